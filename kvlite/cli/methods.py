"""`kvlite methods`: what there is to choose from."""

import json
from typing import Annotated

import typer


def methods(
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of a table")
    ] = False,
) -> None:
    """List the ways to compress a cache, their options and papers.

    Examples:

      kvlite methods

      kvlite ask report.pdf "Who paid?" --method snapkv:window=16,pool=31
    """
    from kvlite.methods import METHODS

    rows = [
        {
            "name": method.name,
            "summary": method.summary,
            "paper": method.paper,
            "frees_memory": method.frees_memory,
            "options": method.defaults(),
        }
        for method in METHODS.values()
    ]
    if as_json:
        print(json.dumps({"methods": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "what it does", "frees memory", "options", "paper", show_lines=True)
    for method in METHODS.values():
        options = ", ".join(f"{name}={value}" for name, value in method.defaults().items())
        freed = "yes" if method.frees_memory else "no"
        table.add_row(method.name, method.summary, freed, options, method.paper)
    Console().print(table)
