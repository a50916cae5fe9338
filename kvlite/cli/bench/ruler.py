"""`kvlite bench ruler`: several needles, chains, counts."""

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

TASKS = ["single", "multi-key", "multi-value", "multi-query", "variables", "words"]
Tasks = Annotated[
    list[str],
    typer.Option("--task", callback=once, help=f"{', '.join(TASKS)}; may be repeated"),
]


@with_model
def ruler(
    settings: Settings,
    tokens: Tokens = [2000],
    method: Methods = METHODS,
    budget: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    recall: Recall = NO_RECALL,
    recall_bits: RecallBits = RECALL_BITS,
    task: Tasks = TASKS,
    question: Question = "known",
    repeats: Repeats = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Ask for one of several needles, for all of them, for a chain of variables, for the words
    that stand most often: tasks after RULER.

    Found is the share of the wanted names or numbers that are in the answer. Small models fail
    some tasks with their whole cache: compare with `full`.

    Examples:

      kvlite bench ruler --tokens 4000 --budget 512 --repeats 10

      kvlite bench ruler --task multi-query --task variables --question both --out run2

      kvlite bench ruler --tokens 4000 --question unknown --budget 256 --recall off,0,128
    """
    from kvlite.bench.grid import require_known
    from kvlite.bench.ruler import KINDS, ruler_cases

    require_known("--task", task, KINDS)
    own = {"tasks": task}
    asked = Asked(tokens, method, budget, kv_bits, recall, recall_bits, question, repeats, own)

    def recipes(tokenizer: Any, prose: str) -> "Sequence[Recipe]":
        return ruler_cases(tokenizer, prose, lengths=tokens, kinds=task, repeats=repeats)

    run_asking("ruler", "Tasks after RULER", asked, recipes, settings, out, as_json)
