"""Getting a model from Hugging Face: what that takes, then the download and its check."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from kvlite.errors import ModelError
from kvlite.model.hub import (
    Download,
    download_of,
    downloaded,
    gguf_among,
    require_undamaged,
)
from kvlite.model.source import find_config, is_repo, require_weights

Progress = Callable[[int, int], None]
_DEFAULT_GGUF = "Q4_K_M"


@dataclass(frozen=True)
class Wanted:
    """A model on the hub.

    Attributes:
        repo: its Hugging Face id.
        file: the one GGUF file that is wanted; "" for all of the repository's safetensors. Their
            config is here, to plan with.
        download: what getting it takes.
    """

    repo: str
    file: str
    download: Download

    def get(self, progress: Progress, cancel: Event | None = None) -> Path:
        """Its folder, or its GGUF file, once all of it is here; a download that was stopped goes
        on. Args and errors are those of `hub.downloaded`."""
        folder = downloaded(self.repo, progress, cancel, only=self.file)
        return folder / self.file if self.file else require_weights(folder, self.repo)

    def require_undamaged(
        self, path: Path, progress: Progress, cancel: Event | None = None
    ) -> None:
        """As `hub.require_undamaged`, for what `get` returned."""
        require_undamaged(path.parent if self.file else path, progress, cancel)

    def name(self, path: Path) -> str:
        """What `--model` takes, for what `get` returned."""
        return str(path) if self.file else self.repo


def wanted_of(repo: str, file: str | None = None, cancel: Event | None = None) -> Wanted:
    """What a repository has to get; asks the hub.

    Args:
        file: a GGUF file, or a part of its name; None for safetensors, where there are some.

    Raises:
        ModelError: there is no such model or file, it cannot be run, or there is no network.
        Stopped: `cancel` was set.
    """
    if not is_repo(repo):
        raise ModelError(f"{repo!r} is no Hugging Face id: give one such as Qwen/Qwen3-0.6B")
    if file is None and download_of(repo, cancel).has_weights:
        find_config(repo, None, cancel)
        return Wanted(repo, "", download_of(repo, cancel))  # the config is here now
    ggufs = download_of(repo, cancel, only="*.gguf").sizes
    if not ggufs:
        raise ModelError(f"{repo} has neither .safetensors nor .gguf weights")
    chosen = gguf_among(ggufs, file or _DEFAULT_GGUF, repo)
    return Wanted(repo, chosen, download_of(repo, cancel, only=chosen))
