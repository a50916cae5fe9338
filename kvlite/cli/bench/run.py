"""One run of the bench: open the folder and the model, keep every row, report."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvlite.cli import INTERRUPTED
from kvlite.cli.console import output, print_json
from kvlite.cli.screen import console, reading_bar
from kvlite.config.settings import Settings

if TYPE_CHECKING:
    from kvlite.bench.folder import RunFolder
    from kvlite.bench.report import Line
    from kvlite.conversation.runner import Runner

Done = frozenset[tuple[Any, ...]]
Measured = tuple[int, Iterator[Any]]


@dataclass(frozen=True)
class Measurement:
    """What a command measures.

    Attributes:
        command: its name.
        title: what the progress bar and the table say.
        row: the dataclass of its rows, whose `KEY` names the values that tell them apart; values
            with a default were not always there.
        measure: given the runner and the keys of rows there are, how many rows the grid has and
            those that are missing, one by one; refuses what cannot be measured before it returns.
        lines: rows as a table shows them.
        draw: makes plots of rows in a folder.
    """

    command: str
    title: str
    row: Any
    measure: Callable[["Runner", Done], Measured]
    lines: "Callable[[list[Any]], Sequence[Line]]"
    draw: Callable[[list[Any], Path], list[Path]] | None = None


def run(
    measurement: Measurement,
    settings: Settings,
    options: Mapping[str, Any],
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure what the folder does not have yet; Ctrl-C keeps what is done.

    Args:
        options: all that decides the rows, by name.
    """
    from kvlite.bench.config import configuration
    from kvlite.bench.folder import RunFolder
    from kvlite.conversation.runner import open_runner
    from kvlite.model.load import choose_device
    from kvlite.model.source import find_model

    screen = console()
    choose_device(settings.device)
    with screen.status("Loading the model") as status:
        model = find_model(settings.model, status.update)
        chosen = {**options, "device": settings.device, "weights": settings.weights}
        config = configuration(measurement.command, chosen, settings.model, model)
        row = measurement.row
        absent = {each.name: each.default for each in fields(row) if each.default is not MISSING}
        folder = RunFolder(out or _new_folder(measurement.command), config, row.KEY, absent)
        runner = open_runner(settings, status.update)
    total, rows = measurement.measure(runner, folder.done)
    folder.begin()
    stopped = False
    with reading_bar(screen, measurement.title) as bar:
        bar.update(len(folder.rows), total)
        try:
            for each in rows:
                folder.add(each.to_json())
                bar.update(len(folder.rows), total)
        except KeyboardInterrupt:
            stopped = True
    _report(measurement, folder, config["machine"], total, as_json)
    if stopped:
        command = [*sys.argv[1:], *([] if out else ["--out", str(folder.path)])]
        screen.print(
            f"Stopped after {len(folder.rows):,} of {total:,} rows. To go on: "
            f"kvlite {shlex.join(command)}",
        )
        raise typer.Exit(INTERRUPTED)


def _report(
    measurement: Measurement,
    folder: "RunFolder",
    machine: Mapping[str, str],
    total: int,
    as_json: bool,
) -> None:
    from kvlite.bench.report import NO_PLOTS, can_draw, write_table

    screen = console()
    rows = [measurement.row(**row) for row in folder.rows]
    lines = measurement.lines(rows)
    done = len(rows)
    write_table(folder.path, measurement.title, lines, machine, done=done, total=total)
    if rows and measurement.draw is not None:
        if can_draw():
            measurement.draw(rows, folder.path)
        else:
            screen.print(NO_PLOTS)
    if as_json:
        report = {"machine": machine, "folder": str(folder.path), "rows": folder.rows}
        print_json(report)
    elif lines:
        _print_table(lines, machine)
    screen.print(f"Rows, table and plots: {folder.path}")


def _print_table(lines: "Sequence[Line]", machine: Mapping[str, str]) -> None:
    from rich.table import Column, Table

    caption = ", ".join(f"{name} {value}" for name, value in machine.items())
    # Narrow terminals fold what they have no room for, and leave nothing out.
    columns = [Column(name, overflow="fold") for name in lines[0].cells()]
    table = Table(*columns, caption=caption)
    for line in lines:
        table.add_row(*line.cells().values())
    output().print(table)


def _new_folder(command: str) -> Path:
    from kvlite.config.paths import data_folder

    now = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    return data_folder() / "bench" / f"{command}-{now}"
