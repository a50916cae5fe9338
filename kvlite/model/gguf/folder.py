"""A folder for each GGUF file, in the user's cache, with what the rest of kvlite needs of a model:
config.json, tokenizer, and where the weights lie. Weights stay in the file.

It is named by what is in the file, and by this package's sources: another kvlite makes its own.
"""

import errno
import hashlib
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Event

from kvlite.config.atomic_file import replaced
from kvlite.config.paths import cache_folder
from kvlite.errors import ModelError, reason, require_uncancelled
from kvlite.model.config_check import require_sound
from kvlite.model.gguf.config import config_of
from kvlite.model.gguf.header import Header, read_header
from kvlite.model.gguf.index import read_index, write_index
from kvlite.model.gguf.tokenizer import write_tokenizer

FOLDER = "gguf"
# The one that says that all are there is written last.
_TOKENIZER = "tokenizer_config.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Tokens from which on a tokenizer takes seconds to make.
_MANY = 100_000


def gguf_folder(
    file: Path,
    notify: Callable[[str], None] | None = None,
    cancel: Event | None = None,
    *,
    with_tokenizer: bool = True,
) -> Path:
    """The folder of a GGUF file, or of all parts of a model that is split; a plan needs no
    tokenizer in it. `notify` is told what may take over two seconds. Raises ModelError if the file
    is not a whole GGUF of a language model that kvlite runs, or the cache cannot be written;
    Stopped if `cancel` was set."""
    try:
        header = read_header(file)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read ({error.strerror}): check it and its permissions"
        ) from None
    folder = cache_folder() / FOLDER / f"{file.stem[:100]}-{header.digest}-{_sources()}"
    try:
        _describe(folder, header)
        require_uncancelled(cancel)
        if with_tokenizer and not (folder / _TOKENIZER).is_file():
            tokens = header.fields.get("tokenizer.ggml.tokens", ())
            if notify is not None and len(tokens) > _MANY:
                notify(f"Reading the vocabulary of {file.name}, once")
            _write_tokenizer(folder, header)
    except OSError as error:
        raise _unusable(folder.parent, error) from error
    require_uncancelled(cancel)
    return folder


def files_used() -> list[Path]:
    """The first files of all GGUF models that have a folder, and lie where they lay."""
    folders = sorted((cache_folder() / FOLDER).glob("*-*-*"))
    found = (read_index(folder) for folder in folders)
    return [*dict.fromkeys(index.path for index in found if index is not None)]


def outdated_folders() -> list[Path]:
    """Folders that another kvlite made."""
    folders = (cache_folder() / FOLDER).glob("*-*-*")
    return sorted(each for each in folders if not each.name.endswith(f"-{_sources()}"))


def _describe(folder: Path, header: Header) -> None:
    from kvlite.model.gguf.tensors import module_of, tensors_of

    index = read_index(folder)
    if index is not None and [path for path, *_ in index.files] == [
        path.absolute() for path in header.paths
    ]:
        return
    if not header.tensors:
        raise ModelError(f"{header.paths[0]} has no weights: get the whole file")
    config, file = config_of(header)
    require_sound(config, header.paths[0])
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / "config.json") as written:
        written.write(json.dumps(config, indent=1).encode())
    try:
        made = module_of(folder)
    except Exception as error:  # transformers fails in many ways over a stranger's config
        raise ModelError(
            f"{header.paths[0]} does not describe a model ({reason(error)}): get the file again"
        ) from error
    tensors = tensors_of(file, config, *made)
    write_index(folder, header.paths, header.digest, tensors)


def _write_tokenizer(folder: Path, header: Header) -> None:
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
        write_tokenizer(header, Path(partial))
        found = (made for made in Path(partial).rglob("*") if made.is_file())
        for made in sorted(found, key=lambda made: made.name == _TOKENIZER):
            place = folder / made.relative_to(partial)
            place.parent.mkdir(exist_ok=True)
            made.replace(place)


@cache
def _sources() -> str:
    """A digest of this package: what it makes of a file may change with it."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]


def _unusable(folder: Path, error: OSError) -> ModelError:
    if error.errno in _FULL:
        return ModelError(
            f"{folder} has no room for a model's tokenizer: make room there, or name another "
            "folder (KVLITE_CACHE)"
        )
    return ModelError(
        f"{folder} cannot hold what kvlite reads of a model ({error.strerror or error}): check it "
        "and its permissions, or name another folder (KVLITE_CACHE)"
    )
