"""Models from Hugging Face: its cache on this machine, or the hub."""

import errno
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from kvlite.config.child_process import run_in_child
from kvlite.config.paths import models_folder
from kvlite.config.units import readable
from kvlite.errors import ModelError, reason
from kvlite.model.gguf.header import names_model

_UNSTORED = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.ENOTDIR, errno.ENOENT),
)
_WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")

_BLOCK = 8 << 20


def fetched(
    repo: str,
    notify: Callable[[str], None] | None = None,
    cancel: Event | None = None,
    *,
    only: str = "",
) -> Path:
    """The folder of a Hugging Face repository, or of the one file that is needed (`only`), from the
    cache or the hub. A download that was stopped continues the next time. `notify` is told of the
    beginning, and of each percent. Raises ModelError if there is no such repository, or neither
    network nor room for it; Stopped if `cancel` was set."""
    say = notify or (lambda said: None)
    say(f"Looking for {repo} in the local cache and on Hugging Face")
    last = -1

    def tell(done: int, total: int) -> None:
        nonlocal last
        if total and last != (last := 100 * done // total):
            say(f"Downloading {repo}: {readable(done)} of {readable(total)}")

    return downloaded(repo, tell, cancel, only=only)


def downloaded(
    repo: str, progress: Callable[[int, int], None], cancel: Event | None = None, *, only: str = ""
) -> Path:
    """As `fetched`; `progress` is called with the bytes that are here and those wanted."""
    return run_in_child(_fetch, repo, only, progress=progress, cancel=cancel)


def download_sizes(
    repo: str, cancel: Event | None = None, *, only: str = ""
) -> tuple[dict[str, int], int]:
    """Bytes of the files of a repository that kvlite wants, or of those that are like `only`, by
    name; and how many of all these bytes are not here yet. Asks the hub; raises as `fetched`."""
    return run_in_child(_ask, repo, only, cancel=cancel)


def gguf_among(sizes: Mapping[str, int], wanted: str, repo: str) -> str:
    """The name of the one GGUF file that is `wanted`: its name or a part of it, in any case. Raises
    ModelError if no file or more than one is like that, or it is a part of a split one; those that
    there are are listed with their sizes."""
    models = [name for name in sizes if names_model(Path(name))]
    found = [name for name in models if wanted.lower() in name.lower()]
    if wanted in models:
        found = [wanted]
    split = [name for name in found if _SPLIT.search(name)]
    if len(found) == 1 and not split:
        return found[0]
    listed = ", ".join(f"{name} ({readable(sizes[name])})" for name in sorted(models)) or "none"
    if split and split == found:
        raise ModelError(
            f"{repo} has {wanted} in parts, which `kvlite pull` does not get: {listed}"
        )
    count = "no GGUF file" if not found else f"{len(found)} GGUF files"
    raise ModelError(
        f"{repo} has {count} like {wanted!r}: choose one of its files with --file: {listed}"
    )


def require_undamaged(
    folder: Path, progress: Callable[[int, int], None], cancel: Event | None = None
) -> None:
    """Compare each downloaded file of a folder with its digest on the hub, which its blob is named
    by in the cache; a damaged one is removed, so that it is got again. `progress` is told of bytes
    compared, and all. Raises ModelError if a file is damaged; Stopped if `cancel` was set."""
    damaged = run_in_child(_check, folder, progress=progress, cancel=cancel)
    if damaged:
        raise ModelError(
            f"{', '.join(damaged)} came damaged and {'was' if len(damaged) == 1 else 'were'} "
            "removed: pull the model again"
        )


def _ask(repo: str, only: str) -> tuple[dict[str, int], int]:
    from huggingface_hub import snapshot_download

    with _named_errors(repo):
        files = snapshot_download(repo, allow_patterns=only or _WANTED_FILES, dry_run=True)
    missing = sum(each.file_size or 0 for each in files if each.will_download)
    return {each.filename: each.file_size or 0 for each in files}, missing


def _check(folder: Path, progress: Callable[[int, int], None]) -> list[str]:
    blobs = [(file, file.resolve()) for file in sorted(folder.rglob("*")) if file.is_symlink()]
    total, done, damaged = sum(blob.stat().st_size for _, blob in blobs), 0, []
    for file, blob in blobs:
        digest = _digest_like(blob)
        if digest is None:
            continue
        with blob.open("rb", buffering=0) as opened:
            while block := opened.read(_BLOCK):
                digest.update(block)
                progress(done := done + len(block), total)
        if digest.hexdigest() != blob.name:
            file.unlink()
            blob.unlink()
            damaged.append(file.name)
    return damaged


def _digest_like(blob: Path) -> Any:
    if len(blob.name) == 64:
        return hashlib.sha256()
    if len(blob.name) == 40:
        return hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    return None


def _fetch(repo: str, only: str, progress: Callable[[int, int], None]) -> Path:
    """Runs in a child process, which can be killed while it waits for the network."""
    from huggingface_hub import hf_hub_download, snapshot_download

    with _named_errors(repo):
        if only.endswith(".json"):
            return Path(hf_hub_download(repo, only)).parent
        bar = _bar(progress)
        return Path(snapshot_download(repo, allow_patterns=only or _WANTED_FILES, tqdm_class=bar))


@contextmanager
def _named_errors(repo: str) -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        DryRunError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise ModelError(f"no model {repo!r}: {error}") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{repo} is not in the local Hugging Face cache and the hub cannot be reached: "
            "check the name and the network, or give a folder"
        ) from None
    except DryRunError:
        raise ModelError(
            f"{repo} is not here, and Hugging Face cannot be asked for it: check the network, and "
            "that HF_HUB_OFFLINE is not set; or download it elsewhere, put its folder into "
            f"{models_folder()}, and name it by --model"
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
