"""`kvlite bench report`: runs as one page."""

from pathlib import Path
from typing import Annotated

import typer

from kvlite.cli.bench.run import Json
from kvlite.cli.console import print_json, say
from kvlite.cli.opening import require_out
from kvlite.errors import SettingError


def report(
    folder: Annotated[Path, typer.Argument(help="a run's folder, or one with several in it")],
    out: Annotated[
        Path | None, typer.Option(help="the page [default: report.html in that folder]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make one page of HTML of runs: commands, tables, plots, and the layers of calibrated models.

    It needs no other file.

    Examples:

      kvlite bench report run1

      kvlite bench report ~/.local/share/kvlite/bench --out all.html
    """
    from kvlite.bench.page import page, runs_in

    if not folder.is_dir():
        raise SettingError(f"{folder} is no folder: name one that `kvlite bench` has written")
    path = out or folder / "report.html"
    require_out(str(path))
    found = runs_in(folder)
    path.write_text(page(found), encoding="utf-8")
    if as_json:
        print_json({"path": str(path), "runs": [str(each.path) for each in found]})
    else:
        say(f"{len(found)} run{'' if len(found) == 1 else 's'} in {path}")
