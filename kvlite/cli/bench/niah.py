"""`kvlite bench niah`: a needle in a haystack."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli.bench.options import (
    METHODS,
    Budgets,
    Device,
    Dtype,
    Json,
    Methods,
    Model,
    Out,
    Question,
    Repeats,
    Tokens,
    once,
)
from kvlite.cli.bench.run import Done, Measured, Measurement, run
from kvlite.settings import EMBEDDED_MODEL, Settings

if TYPE_CHECKING:
    from kvlite.runner import Runner

Kinds = Annotated[
    list[str],
    typer.Option(
        "--kind",
        callback=once,
        help="number: a passcode; sentence: what to do in San Francisco; pairs: one code among "
        "many; may be repeated",
    ),
]


def niah(
    tokens: Tokens = [2000],
    method: Methods = METHODS,
    budget: Budgets = [512],
    depths: Annotated[int, typer.Option(min=1, help="places of the needle, evenly spread")] = 9,
    kind: Kinds = ["number", "sentence", "pairs"],
    question: Question = "known",
    repeats: Repeats = 1,
    model: Model = EMBEDDED_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Hide a needle in real prose and ask for it: which methods still find it?

    Each prompt is read once for all methods and budgets. Found means that the whole number, or
    the whole sentence, is in the answer; leading is the share of a number's digits right from the
    left, or of a sentence's words; surprise is nats a token of it, had the answer begun rightly.

    Examples:

      kvlite bench niah --tokens 2000 --tokens 7000 --budget 256 --budget 1024

      kvlite bench niah --method snapkv --method kvx:pool=31 --depths 3 --repeats 5 --out run1

      kvlite bench niah --kind pairs --question both --json
    """
    settings = Settings(model=model, device=device, dtype=dtype)
    from kvlite.bench.grid import choices, evenly, require_known
    from kvlite.bench.niah import KINDS, niah_cases
    from kvlite.bench.pictures import draw_questions
    from kvlite.bench.prose import bundled_prose
    from kvlite.bench.questions import ASKED, QuestionRow, measured, tallies

    require_known("--kind", kind, KINDS)
    require_known("--question", [question], ASKED)
    grid = choices(method, budget, max(tokens))

    def measure(runner: "Runner", done: Done) -> Measured:
        prose = bundled_prose()
        recipes = niah_cases(
            runner.tokenizer,
            prose,
            lengths=tokens,
            kinds=kind,
            depths=evenly(depths),
            repeats=repeats,
        )
        return measured(runner, prose, recipes, grid, ASKED[question], done)

    options = {
        "tokens": tokens,
        "methods": method,
        "budgets": budget,
        "depths": depths,
        "kinds": kind,
        "question": question,
        "seeds": list(range(repeats)),
    }
    needles = Measurement(
        "niah", "Needles in a haystack", QuestionRow, measure, tallies, draw_questions
    )
    run(needles, settings, options, out, as_json)
