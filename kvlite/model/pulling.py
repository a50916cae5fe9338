"""Getting a model from Hugging Face: what that takes, then the download and its check."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from kvlite.errors import ModelError
from kvlite.model.hub import download_sizes, downloaded, gguf_among, require_undamaged
from kvlite.model.source import find_config, is_repo, require_weights

Progress = Callable[[int, int], None]
_DEFAULT_GGUF = "Q4_K_M"


@dataclass(frozen=True)
class DownloadPlan:
    """A model on the hub.

    Attributes:
        repo: its Hugging Face id.
        file: the one GGUF file that is wanted; "" for all of the repository's safetensors. Their
            config is here, to plan with.
        nbytes: of all files that are wanted.
        missing: of these bytes, those that are not here yet.
    """

    repo: str
    file: str
    nbytes: int
    missing: int

    def download(self, progress: Progress, cancel: Event | None = None) -> Path:
        """Its folder, or its GGUF file, once all of it is here; a download that was stopped goes
        on. Args and errors are those of `hub.downloaded`."""
        folder = downloaded(self.repo, progress, cancel, only=self.file)
        return folder / self.file if self.file else require_weights(folder, self.repo)

    def require_undamaged(
        self, path: Path, progress: Progress, cancel: Event | None = None
    ) -> None:
        """As `hub.require_undamaged`, for what `download` returned."""
        require_undamaged(path.parent if self.file else path, progress, cancel)

    def name(self, path: Path) -> str:
        """What `--model` takes, for what `download` returned."""
        return str(path) if self.file else self.repo


def download_plan(repo: str, file: str | None = None, cancel: Event | None = None) -> DownloadPlan:
    """What a repository has to get; asks the hub. `file` is a GGUF file, or a part of its name;
    None for safetensors, where there are some. Raises ModelError if there is no such model or file,
    it cannot be run, or there is no network; Stopped if `cancel` was set."""
    if not is_repo(repo):
        raise ModelError(f"{repo!r} is no Hugging Face id: give one such as Qwen/Qwen3-0.6B")
    chosen = ""
    weights = () if file is not None else download_sizes(repo, cancel)[0]
    if not any(name.endswith(".safetensors") for name in weights):
        ggufs, _ = download_sizes(repo, cancel, only="*.gguf")
        if not ggufs:
            raise ModelError(f"{repo} has neither .safetensors nor .gguf weights")
        chosen = gguf_among(ggufs, file or _DEFAULT_GGUF, repo)
    else:
        find_config(repo, None, cancel)
    sizes, missing = download_sizes(repo, cancel, only=chosen)
    return DownloadPlan(repo, chosen, sum(sizes.values()), missing)
