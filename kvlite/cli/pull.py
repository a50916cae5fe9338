"""`kvlite pull`: getting a model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli.console import print_json
from kvlite.cli.models import CONTEXT, with_device
from kvlite.cli.opening import uncollected
from kvlite.cli.options import AsJson
from kvlite.cli.screen import at_terminal, console, reading_bar, stop_on_interrupt
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.errors import ModelError

if TYPE_CHECKING:
    from rich.console import Console

    from kvlite.planner.fitting import Fit

_DEFAULT_GGUF = "Q4_K_M"


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

    def agrees() -> bool:
        return yes or not at_terminal() or typer.confirm("Download it?", True)

    screen = console()
    got = pulled(settings, model, tokens, screen, file=file, agrees=agrees)
    if as_json:
        print_json(
            {
                "model": got.name,
                "bytes": got.nbytes,
                "downloaded_bytes": got.downloaded,
                "folder": str(got.folder),
                "context": tokens,
                "fits": got.fit.to_json(),
            }
        )
        return
    screen.print(f'Here now: kvlite ask report.pdf "What does it conclude?" --model {got.name}')


@dataclass(frozen=True)
class Pulled:
    """A model that is here now.

    Attributes:
        name: what `--model` takes.
        nbytes, downloaded: bytes of its files, and of those that were not here.
    """

    name: str
    folder: Path
    nbytes: int
    downloaded: int
    fit: "Fit"


def pulled(
    settings: Settings,
    model: str,
    tokens: int,
    screen: "Console",
    *,
    file: str | None = None,
    agrees: Callable[[], bool] = lambda: True,
) -> Pulled:
    """Get a model, under a progress bar; `agrees` is asked once it was said how large it is.

    Raises:
        ModelError: there is no such model, it cannot be planned for, or it came damaged.
        Stopped: by Ctrl-C.
        typer.Exit: nobody agreed.
    """
    from kvlite.model.hub import download_of, downloaded, gguf_among, require_undamaged
    from kvlite.model.source import find_config, is_repo, require_weights
    from kvlite.planner.fitting import fit_of

    if not is_repo(model):
        raise ModelError(f"{model!r} is no Hugging Face id: give one such as Qwen/Qwen3-0.6B")
    with stop_on_interrupt() as cancel:
        with screen.status(f"Asking Hugging Face about {model}"), uncollected():
            wanted, chosen, fit = download_of(model, cancel), "", None
            if file is not None or not wanted.has_weights:
                ggufs = download_of(model, cancel, only="*.gguf").sizes
                if not ggufs:
                    raise ModelError(f"{model} has neither .safetensors nor .gguf weights")
                chosen = gguf_among(ggufs, file or _DEFAULT_GGUF, model)
                wanted = download_of(model, cancel, only=chosen)
            else:
                find_config(model, None, cancel)
                wanted = download_of(model, cancel)  # the config is here now
                fit = fit_of(settings, model, tokens)
                if fit.plan is None:
                    raise ModelError(fit.flaw)
        here = wanted.nbytes - wanted.missing
        known = f", {readable(here)} of it here already" if here else ""
        about = f"{model}, {chosen}" if chosen else model
        fits = "" if fit is None or fit.plan is None else f" {fit.line()} on {fit.plan.room.name}."
        screen.print(f"{about}: {readable(wanted.nbytes)}{known}.{fits}")
        if wanted.missing and not agrees():
            raise typer.Exit
        with reading_bar(screen, f"Downloading {model}") as bar:
            folder = downloaded(model, bar.update, cancel, only=chosen)
            path = folder / chosen if chosen else require_weights(folder, model)
        with reading_bar(screen, "Comparing digests") as bar:
            require_undamaged(folder, bar.update, cancel)
    name = str(path) if chosen else model
    if fit is None:
        fit = fit_of(settings, name, tokens)
        screen.print(f"{fit.line()}.")
    return Pulled(name, folder, wanted.nbytes, wanted.missing, fit)
