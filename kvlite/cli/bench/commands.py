"""`kvlite bench`: measure methods on this machine."""

from importlib import import_module
from typing import Any

import typer

from kvlite.bench.options import COMMANDS, Options
from kvlite.cli.bench.harness import lm_eval
from kvlite.cli.bench.peers import install_peers
from kvlite.cli.bench.run import Json, Out, run
from kvlite.cli.opening import require_files
from kvlite.cli.options import Command, with_fields, with_model
from kvlite.config.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed, memory and quality on this machine.\n\n"
    "Every command writes its rows to a folder (--out), and goes on from there once stopped.",
    epilog="Try: kvlite bench niah --tokens 2000 --budget 128 --budget 512 --depths 3",
)


def measures(options: type[Options]) -> Command:
    """The command of a benchmark, whose task is imported when it is run."""

    @with_fields(options)
    def command(
        settings: Settings, *, out: Out = None, as_json: Json = False, **given: Any
    ) -> None:
        file: str | None = given.get("file")
        require_files([file] if file else [], settings)
        module = import_module(f"kvlite.bench.{options.name}")
        task = getattr(module, options.name.capitalize())(**given)
        run(task, settings, out, as_json)

    command.__doc__ = options.__doc__
    return with_model(command)


for each in COMMANDS:
    app.command(each.name)(measures(each))
app.command()(install_peers)
app.command("lm-eval")(lm_eval)
