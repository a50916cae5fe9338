"""Options that the commands of the bench share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvlite.settings import Settings


def once(values: list[Any]) -> list[Any]:
    """What was given twice counts once."""
    return list(dict.fromkeys(values))


METHODS = ["snapkv", "pyramidkv", "kvx", str(Settings.method)]

Model = Annotated[str, typer.Option(help="as for `kvlite ask`")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Weights = Annotated[str, typer.Option(help="auto, fp32, bf16, fp16, int8 or nf4")]
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
