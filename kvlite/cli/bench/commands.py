"""`kvlite bench`: measure methods on this machine."""

from importlib import import_module
from typing import Any

import typer

from kvlite.bench.options import COMMANDS, Options
from kvlite.cli.bench.harness import lm_eval
from kvlite.cli.bench.run import Out, run
from kvlite.cli.opening import require_files
from kvlite.cli.options import AsJson, Command, with_fields, with_model
from kvlite.cli.screen import console
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
        settings: Settings, *, out: Out = None, as_json: AsJson = False, **given: Any
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
app.command("lm-eval")(lm_eval)


@app.command()
def install_peers() -> None:
    """Make an environment for kvpress and transformers' quantized caches, which want another
    transformers: for `--peer` of `kvlite bench niah` and `ruler`. It takes some 1.5 GB.

    Examples:

      kvlite bench install-peers
    """
    from kvlite.bench.peers import install

    screen = console()
    with screen.status("Looking for packages") as status:
        found = install(status.update)
    screen.print(f"Installed {', '.join(f'{name} {held}' for name, held in found.items())}")
