"""Files that are replaced whole or not at all, however the program ends."""

import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from kvlite.config.units import readable
from kvlite.errors import SnapshotError

_PART = re.compile(r"\..*\.(\d+)-[0-9a-f]{8}\.part", re.DOTALL)


@contextmanager
def replaced(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` when the block ends without an error; until
    then it has another name in the same folder. What killed programs left there is removed.

    Args:
        private: whether nobody else may read it.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        sweep(target.parent)
        with part.open("xb") as file:
            if private:
                os.chmod(part, 0o600)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        _flush_folder(target.parent)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, size: int) -> Iterator[IO[bytes]]:
    """As `replaced`, of what was said, which is nobody else's.

    Args:
        size: bytes it will have.

    Raises:
        SnapshotError: there is no room, or it cannot be written; what was there still is.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise SnapshotError(f"{path} is a folder: name a file")
        if target.exists() and not target.is_file():
            raise SnapshotError(f"{path} is a device or a pipe: name a file")
        sweep(target.parent)  # which may make room
        _require_room(target, size)
        with replaced(target, private=True) as file:
            yield file
    except OSError as error:
        why = error.strerror or str(error)
        raise SnapshotError(
            f"{path} cannot be written ({why}); what was there still is: check the folder and its "
            "permissions, or name another"
        ) from error


def sweep(folder: Path) -> None:
    """Remove what programs that are no longer there did not finish writing."""
    for file in folder.iterdir():
        match = _PART.fullmatch(file.name)
        if match is not None and not _writes(int(match[1]), file):
            with suppress(OSError):
                file.unlink()


def _writes(pid: int, file: Path) -> bool:
    """Whether the program that began a file may still be there: its number can be another's now."""
    try:
        return bool(psutil.Process(pid).create_time() <= file.stat().st_mtime + 1)
    except (psutil.NoSuchProcess, FileNotFoundError, OverflowError):
        return False
    except (psutil.Error, OSError):
        return True


def _require_room(target: Path, size: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise SnapshotError(
            f"{target} would take {readable(size)}, and its disk has {readable(free)} free: remove "
            "something (`kvlite library remove NAME`), or name a file elsewhere"
        )


def _flush_folder(folder: Path) -> None:
    """Let the new name outlive a power cut, where the folder allows it: it is in place already."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
