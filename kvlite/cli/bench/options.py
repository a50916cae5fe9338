"""Options that the commands of the bench share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvlite.config.settings import Settings


def once(values: list[Any]) -> list[Any]:
    """What was given twice counts once."""
    return list(dict.fromkeys(values))


def listed(values: list[str]) -> list[str]:
    """What was given together, with commas between, and apart."""
    return once([each.strip() for value in values for each in value.split(",")])


NO_RECALL, KV_BITS = ["off"], ["16"]
RECALL_BITS = [str(Settings.recall_bits)]
METHODS = ["snapkv", "pyramidkv", "kvx", str(Settings.method)]

Tokens = Annotated[
    list[int], typer.Option(min=100, callback=once, help="prompt length; may be repeated")
]
Methods = Annotated[
    list[str],
    typer.Option(
        "--method",
        callback=once,
        help="as for `kvlite ask`; may be repeated. full and random are added where they are not "
        "named",
    ),
]
Budgets = Annotated[
    list[int],
    typer.Option("--budget", min=1, callback=once, help="entries a KV head; may be repeated"),
]
KVBits = Annotated[
    list[str],
    typer.Option("--kv-bits", callback=once, help="as for `kvlite ask`; may be repeated"),
]
Recall = Annotated[
    list[str],
    typer.Option(
        "--recall",
        callback=listed,
        help="off, or entries that each token of an answer may look for in all that was read, 0 "
        "for recall between turns only; several with commas between, as in off,0,128. Methods "
        "that have nothing to bring back are measured without",
    ),
]
RecallBits = Annotated[
    list[str],
    typer.Option(
        "--recall-bits", callback=listed, help="as for `kvlite ask`; several with commas between"
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="prompts of each kind, from different seeds")]
Question = Annotated[
    str,
    typer.Option(
        help="known: the question is read with the text, and entries are kept for it; unknown: the "
        "text is read and cut before it is asked; both"
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="folder of the run: configuration, rows, table, plots; given again, a stopped run "
        "goes on [default: a new one in the user's data folder]"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")]


def recall_options(recall: list[str], bits: list[str]) -> dict[str, list[str]]:
    """What decides the rows of a run, none where nothing recalls: so runs that were begun before
    anything did go on."""
    return {} if recall == NO_RECALL else {"recall": recall, "recall bits": bits}
