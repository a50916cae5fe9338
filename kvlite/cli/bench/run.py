"""One run of the bench: open the folder and the model, keep every row, report."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.measure import Measurement
from rich.table import Column, Table

from kvlite.cli import INTERRUPTED
from kvlite.cli.console import Screen, output, print_json
from kvlite.cli.screen import console, reading_bar, tell_of_compiling
from kvlite.cli.word_wrap import option_wrapped
from kvlite.config.settings import Settings
from kvlite.model.source import find_model

if TYPE_CHECKING:
    from kvlite.bench.folder import RunFolder
    from kvlite.bench.rows import Cells
    from kvlite.bench.task import Task, Work

NO_PLOTS = 'no plots: matplotlib is not installed (pip install "kvlite[bench]")'
# Columns of a table that nothing is broken in, and of a method in one that is too wide.
_WHOLE, _METHOD = 10_000, 12

Out = Annotated[
    Path | None,
    typer.Option(
        help="folder of the run: configuration, rows, table, plots; given again, a stopped run "
        "goes on [default: a new one in the user's data folder]"
    ),
]


def run(
    task: "Task[Any]", settings: Settings, out: Path | None, as_json: bool, seconds: float = inf
) -> "list[Any]":
    """Measure what the folder does not have yet; Ctrl-C keeps what is done.

    Args:
        seconds: how long it may take, from now on.

    Returns:
        All rows.
    """
    begun = monotonic()
    from kvlite.bench.folder import machine, opened
    from kvlite.bench.task import measure
    from kvlite.conversation.runner import open_runner
    from kvlite.model.devices import choose_devices

    screen, settings = console(), task.settings(settings)
    choose_devices(settings.device)
    tell_of_compiling(screen)
    with screen.status("Loading the model") as status:
        model = find_model(settings.model, status.update)
        folder = opened(task, settings, model, out)
        runner = open_runner(settings, status.update)
    task.resume(folder.rows)
    work, total = task.work(runner), None
    if seconds == inf:
        work = list(work)
        total = sum(len(keys) for keys, _ in work)
    folder.begin()
    stopped = False
    with reading_bar(screen, task.title) as bar:

        def show() -> None:
            if total is None:
                bar.update(int(monotonic() - begun), int(seconds))
            else:
                bar.update(len(folder.rows), total)

        def told() -> "Iterator[Work[Any]]":
            for keys, unit in work:
                bar.title(task.doing(keys))
                yield keys, unit

        show()
        try:
            for each in measure(told(), folder.done, begun + seconds):
                folder.add(each.to_json())
                show()
        except KeyboardInterrupt:
            stopped = True
    rows = [task.row(**each) for each in folder.rows]
    _report(task, folder, rows, machine(), total, as_json)
    if stopped:
        command = [*sys.argv[1:], *([] if out else ["--out", str(folder.path)])]
        of = "" if total is None else f" of {total:,}"
        screen.print(
            f"Stopped after {len(folder.rows):,}{of} rows. To go on: kvlite {shlex.join(command)}"
        )
        raise typer.Exit(INTERRUPTED)
    return rows


def _report(
    task: "Task[Any]",
    folder: "RunFolder",
    rows: Sequence[Any],
    machine: Mapping[str, str],
    total: int | None,
    as_json: bool,
) -> None:
    screen = console()
    lines = task.table(rows)
    folder.write_table(task.title, lines, machine, total)
    if rows and task.curves:
        if find_spec("matplotlib") is not None:
            task.draw(rows, folder.path)
        else:
            screen.print(NO_PLOTS)
    if as_json:
        report = {"machine": machine, "folder": str(folder.path), "rows": folder.rows}
        print_json({**report, **task.summary(rows)})
    elif lines:
        _print_table(lines, machine)
    screen.print(f"Rows, table and plots: {folder.path}")


def _print_table(lines: "Sequence[Cells]", machine: Mapping[str, str]) -> None:
    # What is the same in all lines is said below them: terminals are narrow.
    alike = {
        name: value
        for name, value in lines[0].items()
        if len(lines) > 1 and all(line[name] == value for line in lines)
    }
    caption = [
        ", ".join(f"{name} {value}" for name, value in each.items()) for each in (alike, machine)
    ]
    names = [name for name in lines[0] if name not in alike]

    def table(width: int) -> Table:
        # What there is no room for is folded, and nothing left out.
        columns = [Column(name, overflow="fold", no_wrap=name == "method") for name in names]
        made = Table(*columns, caption="\n".join(caption).strip())
        for line in lines:
            cells = {**line, "method": option_wrapped(line.get("method", ""), width)}
            made.add_row(*(cells[name] for name in names))
        return made

    screen = output()
    if not screen.is_terminal:  # a file's lines are as long as they are
        screen = Screen(file=sys.stdout, width=_WHOLE)
    needed = Measurement.get(screen, screen.options.update(max_width=_WHOLE), table(_WHOLE))
    longest = max(len(line.get("method", "")) for line in lines)
    spared = needed.maximum - screen.width
    screen.print(table(_WHOLE if spared <= 0 else max(_METHOD, longest - spared)))
