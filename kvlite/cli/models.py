"""`kvlite models`: the models on this machine."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from kvlite.cli.console import output, print_json
from kvlite.cli.opening import uncollected
from kvlite.cli.options import AsJson, with_settings
from kvlite.cli.screen import at_terminal, console, reading_bar, stop_on_interrupt
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.errors import ModelError, SettingError

if TYPE_CHECKING:
    from kvlite.model.local_models import LocalModel
    from kvlite.planner.fitting import Fit

CONTEXT = 32_768
Context = Annotated[int, typer.Option("--context", min=1, help="tokens of the text that is to fit")]
with_device = partial(with_settings, names=("device", "weights", "vram"))

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    epilog="Try: kvlite pull Qwen/Qwen3-0.6B, then kvlite models",
)


@app.callback(invoke_without_command=True)
@with_device
def listing(
    settings: Settings,
    typer_context: typer.Context,
    tokens: Context = CONTEXT,
    as_json: AsJson = False,
) -> None:
    """Models on this machine, with size, context, and whether a text fits the device by the plan.

    Looks in Hugging Face's cache, kvlite's models folder (KVLITE_MODELS), LM Studio's and Ollama's
    folders, and among the GGUF files that were used before.

    Examples:

      kvlite models

      kvlite models --context 131072 --vram 24GiB --json

      kvlite models remove Qwen/Qwen3-0.6B
    """
    if typer_context.invoked_subcommand is not None:
        return
    from kvlite.model.local_models import models_here
    from kvlite.planner.fitting import Fit, fit_of

    screen = console()
    with screen.status("Looking for models"):
        found = models_here()
    rows = []
    with stop_on_interrupt(), uncollected():
        for number, model in enumerate(found, 1):
            with screen.status(f"Planning {model.name} ({number} of {len(found)})"):
                fit = Fit(None, model.flaw) if model.flaw else fit_of(settings, model.name, tokens)
                rows.append((model, fit))
    if as_json:
        print_json({"context": tokens, "models": [_plain(*row) for row in rows]})
        return
    output().print(_table(rows, tokens))
    for model in found:
        if model.flaw:
            named = model.flaw.startswith(model.name)
            said = model.flaw if named else f"{model.name}: {model.flaw}"
            screen.print(said, style="yellow")


@app.command()
def remove(
    names: Annotated[list[str], typer.Argument(help="as `kvlite models` lists them")],
    as_json: AsJson = False,
) -> None:
    """Delete models from Hugging Face's cache or the models folder; none if one is not there."""
    from kvlite.model.local_models import models_here, remove_model

    here = {model.name: model for model in models_here()}
    for name in names:
        if name not in here:
            raise ModelError(f"no model {name!r} here: `kvlite models` lists them")
    going = [here[name] for name in dict.fromkeys(names)]
    for model in going:
        remove_model(model)
    freed = sum(model.nbytes for model in going)
    if as_json:
        print_json({"removed": [model.name for model in going], "bytes": freed})
        return
    console().print(f"Removed {', '.join(names)}: {readable(freed)} freed.")


@app.command()
def digest(
    model: Annotated[str, typer.Argument(help="a GGUF file, or a model of Ollama's")],
    as_json: AsJson = False,
) -> None:
    """SHA-256 of a GGUF file, or of each part of a model that is split, to compare with a hub's.

    Examples:

      kvlite models digest qwen3-8b-q4_k_m.gguf

      kvlite models digest ollama:llama3.2:3b --json
    """
    from kvlite.model.gguf.header import read_header
    from kvlite.model.local_models import sha256
    from kvlite.model.source import gguf_file, require_model

    require_model(model)
    if (file := gguf_file(model)) is None:
        raise ModelError(f"{model} is no GGUF file: `kvlite pull` checks what comes from a hub")
    made = {}
    with stop_on_interrupt() as cancel:
        for path in read_header(file).paths:
            with reading_bar(console(), f"Reading {path.name}") as bar:
                made[str(path)] = sha256(path, bar.update, cancel)
    if as_json:
        print_json({"sha256": made})
        return
    for name, found in made.items():
        output().print(f"{found}  {name}", soft_wrap=True, highlight=False)


@app.command()
def clean(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete copies of GGUF files that earlier versions of kvlite converted; no file of yours.

    kvlite reads GGUF files where they lie and needs no copies of them.

    Examples:

      kvlite models clean

      kvlite models clean --yes
    """
    from kvlite.model.local_models import bytes_of, leftovers, remove_leftovers

    screen, found = console(), leftovers()
    freed = sum(map(bytes_of, found))
    if found and not yes:
        about = f"{', '.join(map(str, found))} ({readable(freed)})"
        if not at_terminal():
            raise SettingError(f"{about} would be removed: say --yes, or run it in a terminal")
        typer.confirm(f"Remove {about}, which kvlite does not need?", abort=True)
    remove_leftovers(found)
    if as_json:
        print_json({"removed": [str(path) for path in found], "bytes": freed})
        return
    screen.print(f"{readable(freed)} freed." if found else "There is nothing to clean.")


def _plain(model: "LocalModel", fit: "Fit") -> dict[str, Any]:
    return {
        "name": model.name,
        "place": model.place,
        "path": str(model.path),
        "bytes": model.nbytes,
        "architecture": model.architecture,
        "max_context": model.max_context,
        "flaw": model.flaw or None,
        "plan": None if model.flaw else fit.to_json(),
    }


def _table(rows: "list[tuple[LocalModel, Fit]]", tokens: int) -> Any:
    table = Table(
        Column("model", overflow="fold"), "in", "size", "kind", "context", f"{tokens:,} tokens"
    )
    for model, fit in rows:
        context = "" if model.max_context is None else f"{model.max_context:,}"
        size = readable(model.nbytes)
        said = "cannot be run" if model.flaw else fit.line()
        table.add_row(model.name, model.place, size, model.architecture, context, said)
    return table
