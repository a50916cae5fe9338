"""`kvlite methods`: what there is to choose from."""

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlite.cli.console import output, print_json, say

if TYPE_CHECKING:
    from kvlite.methods import Method


def methods(
    name: Annotated[str, typer.Argument(help="a method, to read what its options mean")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of a table")
    ] = False,
) -> None:
    """List the ways to compress a cache, their options and papers; or explain one.

    A method's line is what a KV head keeps. While an answer is written, some keep their line as it
    is, each new token in the place of another; others let it grow.

    Examples:

      kvlite methods

      kvlite methods kvx

      kvlite ask report.pdf "Who paid?" --method snapkv:window=16,pool=31
    """
    from kvlite.methods import METHODS, parse_method

    chosen = [type(parse_method(name))] if name else list(METHODS.values())
    if as_json:
        print_json({"methods": [_row(method) for method in chosen]})
        return
    if name:
        say(_explained(chosen[0]))
        return
    from rich.table import Table

    screen = output()
    table = Table("method", "what it does", "frees memory", "answering", "paper", show_lines=True)
    for method in chosen:
        row = _row(method)
        freed = "yes" if row["frees_memory"] else "no"
        table.add_row(row["name"], row["summary"], freed, row["while_answering"], row["paper"])
    screen.print(table)
    screen.print("Options: kvlite methods NAME")


def _row(method: "type[Method]") -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "frees_memory": method().frees_memory,
        "while_answering": "keeps its line" if method().decoding.bounded else "grows",
        "options": method.defaults(),
    }


def _explained(method: "type[Method]") -> str:
    """What the classes that make up a method say of it, and its options as they stand."""
    texts = [
        inspect.cleandoc(each.__doc__ or "")
        for each in method.__mro__
        if "Attributes:" in (each.__doc__ or "") or each is method
    ]
    options = ",".join(f"{option}={value}" for option, value in method.defaults().items())
    written = f"{method.name}:{options}" if options else method.name
    return "\n\n".join([*texts, f"Defaults: --method {written}"])
