"""`kvlite models` and `kvlite pull`: the models on this machine, and getting others."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlite.cli.console import output, print_json
from kvlite.cli.opening import uncollected
from kvlite.cli.options import AsJson, with_settings
from kvlite.cli.screen import console, reading_bar, stop_on_interrupt
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.errors import KvliteError, ModelError, sentence

if TYPE_CHECKING:
    from rich.console import Console

    from kvlite.model.local_models import LocalModel

CONTEXT, DEFAULT_GGUF = 32_768, "Q4_K_M"
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
    tokens: Annotated[
        int, typer.Option("--context", min=1, help="tokens of the text that is to fit")
    ] = CONTEXT,
    as_json: AsJson = False,
) -> None:
    """Models on this machine, with size, context, and whether a text fits the device by the plan.

    Looks in Hugging Face's cache, kvlite's models folder (KVLITE_MODELS), LM Studio's and Ollama's
    folders.

    Examples:

      kvlite models

      kvlite models --context 131072 --vram 24GiB --json

      kvlite models remove Qwen/Qwen3-0.6B
    """
    if typer_context.invoked_subcommand is not None:
        return
    from kvlite.model.local_models import models_here

    screen = console()
    with screen.status("Looking for models"):
        found = models_here()
    rows = []
    with stop_on_interrupt(), uncollected():
        for number, model in enumerate(found, 1):
            with screen.status(f"Planning {model.name} ({number} of {len(found)})"):
                rows.append((model, _fitting(settings, model, tokens)))
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


@with_device
def pull(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="a Hugging Face id, e.g. Qwen/Qwen3-0.6B")],
    tokens: Annotated[
        int, typer.Option("--context", min=1, help="tokens of the text that is to fit")
    ] = CONTEXT,
    file: Annotated[
        str | None, typer.Option("--file", help="a GGUF file, or a part of its name")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a model, after saying how large it is and whether it fits the device.

    Of a repository of GGUF files it is one, Q4_K_M unless --file says which; whether that fits is
    known once it is here. Goes on where a download was stopped, and compares every file with its
    digest on the hub.

    Examples:

      kvlite pull Qwen/Qwen3-0.6B

      kvlite pull Qwen/Qwen3-8B --context 131072 --yes

      kvlite pull Qwen/Qwen3-8B-GGUF --file q5_k_m
    """
    from kvlite.model.hub import download_of, downloaded, gguf_among, require_undamaged
    from kvlite.model.source import find_config, is_repo, require_weights

    if not is_repo(model):
        raise ModelError(f"{model!r} is no Hugging Face id: give one such as Qwen/Qwen3-0.6B")
    screen = console()
    with stop_on_interrupt() as cancel:
        with screen.status(f"Asking Hugging Face about {model}"), uncollected():
            wanted, chosen = download_of(model, cancel), ""
            if file is not None or not wanted.has_weights:
                ggufs = download_of(model, cancel, only="*.gguf").sizes
                if not ggufs:
                    raise ModelError(f"{model} has neither .safetensors nor .gguf weights")
                chosen = gguf_among(ggufs, file or DEFAULT_GGUF, model)
                wanted = download_of(model, cancel, only=chosen)
            else:
                find_config(model, None, cancel)
                wanted = download_of(model, cancel)  # the config is here now
            fitting = None if chosen else _plan(settings, model, tokens)
        about = f"{model}, {chosen}" if chosen else model
        _announce(screen, about, wanted.nbytes, wanted.missing, fitting)
        if (
            wanted.missing
            and not yes
            and _at_terminal()
            and not typer.confirm("Download it?", True)
        ):
            raise typer.Exit
        with reading_bar(screen, f"Downloading {model}") as bar:
            folder = downloaded(model, bar.update, cancel, only=chosen)
            path = folder / chosen if chosen else require_weights(folder, model)
        with reading_bar(screen, "Comparing digests") as bar:
            require_undamaged(folder, bar.update, cancel)
    named = str(path) if chosen else model
    if chosen:
        fitting = _plan_or_flaw(settings, named, tokens)
        screen.print(f"{_shown(fitting)}.")
    if as_json:
        sizes = {"bytes": wanted.nbytes, "downloaded_bytes": wanted.missing}
        print_json(
            {"model": named, **sizes, "folder": str(folder), "context": tokens, "fits": fitting}
        )
        return
    screen.print(f'Here now: kvlite ask report.pdf "What does it conclude?" --model {named}')


def _announce(
    screen: "Console", model: str, nbytes: int, missing: int, fitting: dict[str, Any] | None
) -> None:
    here = "" if missing == nbytes else f", {readable(nbytes - missing)} of it here already"
    fits = "" if fitting is None else f" {_shown(fitting)} on {fitting['device']}."
    screen.print(f"{model}: {readable(nbytes)}{here}.{fits}")


def _plan(settings: Settings, name: str, tokens: int) -> dict[str, Any]:
    """What the plan says of a text: whether it fits, how the model is loaded, what it takes."""
    from kvlite.planner.candidates import open_planner

    planner = open_planner(settings.replace({"model": name}))
    made = planner.best(max(1, min(tokens, planner.shape.max_context - settings.max_new_tokens)))
    return {
        "tokens": made.tokens,
        "fits": made.fits,
        "weights": made.choice.weights.name,
        "stream": made.choice.stream,
        "kv_bits": made.choice.kv_bits,
        "peak_bytes": made.peak_bytes,
        "device": made.room.name,
    }


def _fitting(settings: Settings, model: "LocalModel", tokens: int) -> dict[str, Any] | None:
    """As `_plan`; None where none can be made."""
    return None if model.flaw else _plan_or_flaw(settings, model.name, tokens)


def _plan_or_flaw(settings: Settings, name: str, tokens: int) -> dict[str, Any]:
    try:
        return _plan(settings, name, tokens)
    except KvliteError as error:
        return {"flaw": sentence(error)}


def _shown(fitting: dict[str, Any] | None) -> str:
    """For a table."""
    if fitting is None:
        return "cannot be run"
    if "flaw" in fitting:
        return str(fitting["flaw"])
    if not fitting["fits"]:
        return f"{fitting['tokens']:,} tokens do not fit"
    streamed = "" if fitting["stream"] == "off" else f", layers from {fitting['stream']}"
    return (
        f"{fitting['tokens']:,} tokens fit ({fitting['weights']}{streamed}, "
        f"{readable(fitting['peak_bytes'])})"
    )


def _plain(model: "LocalModel", fitting: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "name": model.name,
        "place": model.place,
        "path": str(model.path),
        "bytes": model.nbytes,
        "architecture": model.architecture,
        "max_context": model.max_context,
        "flaw": model.flaw or None,
        "plan": fitting,
    }


def _table(rows: "list[tuple[LocalModel, dict[str, Any] | None]]", tokens: int) -> Any:
    from rich.table import Column, Table

    table = Table(
        Column("model", overflow="fold"), "in", "size", "kind", "context", f"{tokens:,} tokens"
    )
    for model, fitting in rows:
        context = "" if model.max_context is None else f"{model.max_context:,}"
        size = readable(model.nbytes)
        table.add_row(model.name, model.place, size, model.architecture, context, _shown(fitting))
    return table


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
