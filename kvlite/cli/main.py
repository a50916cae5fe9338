"""The `kvlite` program."""

import os
import sys
from io import TextIOWrapper
from traceback import format_exc
from typing import Annotated

import typer

from kvlite import __version__
from kvlite.cli import BAD_INPUT, PIPE_CLOSED
from kvlite.cli.agent_config import agent_config
from kvlite.cli.app import app as in_browser
from kvlite.cli.ask import ask
from kvlite.cli.batch import batch
from kvlite.cli.bench.commands import app as bench
from kvlite.cli.calibrate import calibrate
from kvlite.cli.chat.command import chat
from kvlite.cli.config import config
from kvlite.cli.console import say
from kvlite.cli.doctor import doctor
from kvlite.cli.library import app as library
from kvlite.cli.methods import methods
from kvlite.cli.models import app as models
from kvlite.cli.plan import plan
from kvlite.cli.profile import app as profile
from kvlite.cli.pull import pull
from kvlite.cli.read import read
from kvlite.cli.screen import console, ending_on_signals
from kvlite.cli.serve import serve
from kvlite.cli.tune import tune
from kvlite.errors import KvliteError, sentence, shortened

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Long chats and long documents on the one GPU you own.",
    epilog='Try: kvlite ask report.pdf "What does it conclude?"',
)
app.command("app")(in_browser)
COMMANDS = (
    *(chat, ask, batch, read, serve, agent_config, plan, pull, methods, calibrate, tune, config),
    doctor,
)
for command in COMMANDS:
    app.command()(command)
groups = (("models", models), ("profile", profile), ("library", library), ("bench", bench))
for name, group in groups:
    app.add_typer(group, name=name)


def _version(asked: bool) -> None:
    if asked:
        say(f"kvlite {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line. Errors that users can mend are one sentence and exit code 2."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # in an encoding that lacks a character
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    message = ""
    try:
        if sys.stdout is None:
            raise KvliteError("standard output is closed: there is nowhere to answer")
        with ending_on_signals():
            sys.exit(app(prog_name="kvlite", standalone_mode=False))
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            sys.exit(PIPE_CLOSED)  # nobody reads on, as of `kvlite library | head`
        raise
    except typer.TyperException as error:
        message = _usage(error)
    except Exception as error:
        if (ending := _ending(error)) is not None:
            raise ending from None
        if not isinstance(error, KvliteError | OSError):
            # A bug in kvlite; the traceback may quote hostile text.
            console().print(format_exc(), end="")
            sys.exit(1)
        message = _unusable(error) if isinstance(error, OSError) else sentence(error)
    if message:
        console().print(f"kvlite: {shortened(message)}")
    sys.exit(BAD_INPUT)


def _ending(error: BaseException | None) -> BaseException | None:
    """The interrupt or exit behind an error: libraries that are interrupted while they tidy up
    raise errors of their own."""
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__context__
    return error


def _unusable(error: OSError) -> str:
    if error.filename is None:
        return error.strerror or str(error)
    return (
        f"{os.fsdecode(error.filename)} cannot be used ({error.strerror}): check it and its "
        "permissions, or name another folder (KVLITE_DATA, KVLITE_CACHE or KVLITE_CONFIG)"
    )


def _usage(error: typer.TyperException) -> str:
    """What is wrong with the flags, in one sentence; "" if help was printed instead."""
    from pydantic import ValidationError

    message = error.format_message().rstrip(".")
    if not message:
        return ""
    if isinstance(error.__cause__, ValidationError):
        message += f", not {error.__cause__.errors()[0]['input']!r}"
    context = getattr(error, "ctx", None)
    return f"{message} (see `{context.command_path if context else 'kvlite'} --help`)"
