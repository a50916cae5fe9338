"""`kvlite pull`: getting a model."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from kvlite.cli.console import print_json
from kvlite.cli.models import CONTEXT, Context, with_device
from kvlite.cli.opening import uncollected
from kvlite.cli.options import AsJson
from kvlite.cli.screen import at_terminal, console, reading_bar, stop_on_interrupt
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.errors import ModelError


@with_device
def pull(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="a Hugging Face id, e.g. Qwen/Qwen3-0.6B")],
    tokens: Context = CONTEXT,
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

    def agrees() -> bool:
        return yes or not at_terminal() or typer.confirm("Download it?", True)

    screen = console()
    got = pulled(settings, model, tokens, screen, file=file, agrees=agrees)
    if as_json:
        print_json(got | {"context": tokens})
        return
    screen.print(f'Here now: kvlite ask report.pdf "What does it conclude?" --model {got["model"]}')


def pulled(
    settings: Settings,
    model: str,
    tokens: int,
    screen: Console,
    *,
    file: str | None = None,
    agrees: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Get a model, under a progress bar; `agrees` is asked once it was said how large it is.
    Returns what there is now, as JSON has it; `model` is what `--model` takes. Raises ModelError if
    there is no such model, it cannot be planned for, or it came damaged; Stopped by Ctrl-C;
    typer.Exit if nobody agreed."""
    from kvlite.model.pulling import download_plan
    from kvlite.planner.fitting import fit_of

    with stop_on_interrupt() as cancel:
        with screen.status(f"Asking Hugging Face about {model}"), uncollected():
            wanted, fit = download_plan(model, file, cancel), None
            if not wanted.file:
                fit = fit_of(settings, model, tokens)
                if fit.plan is None:
                    raise ModelError(fit.flaw)
        size, missing = wanted.nbytes, wanted.missing
        known = f", {readable(size - missing)} of it here already" if missing < size else ""
        about = f"{model}, {wanted.file}" if wanted.file else model
        fits = "" if fit is None or fit.plan is None else f" {fit.line()} on {fit.plan.room.name}."
        screen.print(f"{about}: {readable(size)}{known}.{fits}")
        if missing and not agrees():
            raise typer.Exit
        with reading_bar(screen, f"Downloading {model}") as bar:
            path = wanted.download(bar.update, cancel)
        with reading_bar(screen, "Comparing digests") as bar:
            wanted.require_undamaged(path, bar.update, cancel)
    name = wanted.name(path)
    if fit is None:
        fit = fit_of(settings, name, tokens)
        screen.print(f"{fit.line()}.")
    return {
        "model": name,
        "bytes": size,
        "downloaded_bytes": missing,
        "folder": str(path.parent if wanted.file else path),
        "fits": fit.to_json(),
    }
