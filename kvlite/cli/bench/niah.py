"""`kvlite bench niah`: a needle in a haystack."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlite.cli.bench.asking import Asked, run_asking
from kvlite.cli.bench.options import (
    KV_BITS,
    METHODS,
    NO_RECALL,
    RECALL_BITS,
    Budgets,
    Json,
    KVBits,
    Methods,
    Out,
    Question,
    Recall,
    RecallBits,
    Repeats,
    Tokens,
    once,
)
from kvlite.cli.options import with_model
from kvlite.config.settings import Settings

if TYPE_CHECKING:
    from kvlite.bench.case import Recipe

Kinds = Annotated[
    list[str],
    typer.Option(
        "--kind",
        callback=once,
        help="number: a passcode; sentence: what to do in San Francisco; pairs: one code among "
        "many; may be repeated",
    ),
]


@with_model
def niah(
    settings: Settings,
    tokens: Tokens = [2000],
    method: Methods = METHODS,
    budget: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    recall: Recall = NO_RECALL,
    recall_bits: RecallBits = RECALL_BITS,
    depths: Annotated[int, typer.Option(min=1, help="places of the needle, evenly spread")] = 9,
    kind: Kinds = ["number", "sentence", "pairs"],
    question: Question = "known",
    repeats: Repeats = 1,
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

      kvlite bench niah --question unknown --budget 256 --recall off,0,128 --recall-bits 16,4
    """
    from kvlite.bench.grid import evenly, require_known
    from kvlite.bench.niah import KINDS, niah_cases

    require_known("--kind", kind, KINDS)
    own = {"depths": depths, "kinds": kind}
    asked = Asked(tokens, method, budget, kv_bits, recall, recall_bits, question, repeats, own)

    def recipes(tokenizer: Any, prose: str) -> "Sequence[Recipe]":
        places = evenly(depths)
        return niah_cases(
            tokenizer, prose, lengths=tokens, kinds=kind, depths=places, repeats=repeats
        )

    run_asking("niah", "Needles in a haystack", asked, recipes, settings, out, as_json)
