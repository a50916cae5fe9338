"""Models from Hugging Face: its cache on this machine, or the hub."""

import errno
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from kvlite.config.child_process import run_in_child
from kvlite.config.units import readable
from kvlite.errors import ModelError, reason

_UNSTORED = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.ENOTDIR, errno.ENOENT),
)
_WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def fetched(
    repo: str,
    notify: Callable[[str], None] | None = None,
    cancel: Event | None = None,
    *,
    only: str = "",
) -> Path:
    """The folder of a Hugging Face repository, from the cache or the hub.

    A download that was stopped continues the next time.

    Args:
        notify: called with a sentence at the beginning, and at each percent of a download.
        cancel: set to stop.
        only: the one file that is needed.

    Raises:
        ModelError: there is no such repository, or neither network nor room for it.
        Stopped: `cancel` was set.
    """
    say = notify or (lambda said: None)
    say(f"Looking for {repo} in the local cache and on Hugging Face")
    last = -1

    def tell(done: int, total: int) -> None:
        nonlocal last
        if total and last != (last := 100 * done // total):
            say(f"Downloading {repo}: {readable(done)} of {readable(total)}")

    return run_in_child(_fetch, repo, only, progress=tell, cancel=cancel)


def _fetch(repo: str, only: str, progress: Callable[[int, int], None]) -> Path:
    """Runs in a child process, which can be killed while it waits for the network."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if only:
            return Path(hf_hub_download(repo, only)).parent
        bar = _bar(progress)
        return Path(snapshot_download(repo, allow_patterns=list(_WANTED_FILES), tqdm_class=bar))
    except HFValidationError as error:
        raise ModelError(f"no model {repo!r}: {error}") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{repo} is not in the local Hugging Face cache and the hub cannot be reached: "
            "check the name and the network, or give a folder"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(
            f"Hugging Face refused {repo}: {str(error).splitlines()[0]} (is the name right, and "
            "are you logged in with `hf auth login` if it is gated?)"
        ) from None
    except Exception as error:  # of the network, from whichever library was using it
        if isinstance(error, OSError) and error.errno in _UNSTORED:
            raise ModelError(
                f"{repo} cannot be stored in {constants.HF_HUB_CACHE} ({error.strerror}): make "
                "room there, or name another folder (HF_HOME)"
            ) from None
        raise ModelError(
            f"{repo} cannot be downloaded ({reason(error)}): check the network and ask for it "
            "again, what has come is kept"
        ) from None


def _bar(progress: Callable[[int, int], None]) -> Any:
    """A tqdm class that reports bytes to `progress` instead of drawing a bar."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            # The hub counts twice: bytes as they come, and as they are written.
            self.reports = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            super().__init__(*given, **options)

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.reports:
                progress(int(self.n), int(self.total or 0))
            return shown

    return Bar
