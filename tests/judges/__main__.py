"""The table of GGUF files in docs/models.md: what kvlite makes of each case.

Run it with `python -m tests.judges`; the page's other part is from `python -m tests.models_table`.
"""

import sys
from pathlib import Path

import torch

from kvlite.errors import KvliteError
from tests.judges.case import Case
from tests.judges.cases import ALL
from tests.judges.kvlite_side import ask_kvlite
from tests.judges.make import Judged, agreeing, furthest, make_all
from tests.judges.tiny import ANSWER, PROMPT

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADING = "## GGUF files"
INTRODUCTION = f"""{HEADING}

Tiny random models, converted by llama.cpp's converter in 32 bits and read by kvlite. *Tokens* are
those of {ANSWER} chosen greedily, after {PROMPT} random ones, that are the same as transformers
chooses with the original model. *llama.cpp* is the greatest difference of log-probabilities of the
first token, over the whole vocabulary, between kvlite and llama.cpp's engine (Gemma's are greater:
llama.cpp takes GELU from a table of 16-bit numbers). `python -m tests.judges` generates this part.

| architecture | case | tokens | llama.cpp | remark |
|---|---|---|---|---|
"""


def row(case: Case) -> str:
    """A case's line of the table."""
    judged = Judged(case)
    expected, reply = judged.expected, judged.llama_cpp
    try:
        answered = ask_kvlite(judged.file, expected.ids)
    except KvliteError as error:
        return _line(case, "refused", "", str(error).replace(str(judged.file), "FILE"))
    mine = answered.log_probabilities
    difference = "does not load" if reply is None else f"{furthest(mine, reply):.0e}"
    return _line(case, str(agreeing(expected.tokens, answered.tokens)), difference, case.reason)


def _line(case: Case, *cells: str) -> str:
    return "| " + " | ".join((case.kind, case.special, *cells)) + " |"


def main() -> None:
    torch.set_num_threads(1)
    make_all(map(Judged, ALL.values()))
    rows = []
    for case in ALL.values():
        rows.append(row(case))
        print(rows[-1], file=sys.stderr, flush=True)
    before = PAGE.read_text().partition(HEADING)[0].rstrip()
    PAGE.write_text(before + "\n\n" + INTRODUCTION + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
