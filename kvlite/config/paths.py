"""Where kvlite keeps its files."""

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile

# The suffix of saved conversations.
SUFFIX = ".kv"


def cache_folder() -> Path:
    """What can be made again, such as converted models: `KVLITE_CACHE`, or the platform's."""
    from platformdirs import user_cache_path

    return Path(os.environ.get("KVLITE_CACHE") or user_cache_path("kvlite"))


def data_folder() -> Path:
    """The library, calibrations, runs of the bench: `KVLITE_DATA`, or the platform's."""
    from platformdirs import user_data_path

    return Path(os.environ.get("KVLITE_DATA") or user_data_path("kvlite", appauthor=False))


def models_folder() -> Path:
    """Models put there by hand, folders or GGUF files: `KVLITE_MODELS`, or `models` in the data
    folder."""
    return Path(os.environ.get("KVLITE_MODELS") or data_folder() / "models")


def config_folder() -> Path:
    """Profiles: `KVLITE_CONFIG`, or the platform's."""
    from platformdirs import user_config_path

    return Path(os.environ.get("KVLITE_CONFIG") or user_config_path("kvlite", appauthor=False))


def nearest_folder(folder: Path) -> Path:
    """The folder itself, or the first above it that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def require_writable(folder: Path) -> None:
    """Check, before work that takes long, that what comes of it can be written to a folder, which
    need not exist yet. It is tried: of an administrator's rights systems promise too much.

    Raises:
        OSError: it cannot.
    """
    there = nearest_folder(folder)
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
    with TemporaryFile(dir=there):
        pass
