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

_PART = re.compile(r"\..*\.(\d+)-[0-9a-f]{8}\.part(\.\w+)?", re.DOTALL)


@contextmanager
def replaced(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that replaces `path` if the block ends without an error.

    Until then it has another name in the same folder, from which leftovers of killed programs are
    removed.

    Args:
        private: whether only its owner may read the file.

    Raises:
        OSError: it cannot be written; `path` is as it was.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(part_name(target.name))
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
    """As `replaced`, for a private file of `size` bytes.

    Raises:
        SnapshotError: there is no room, or it cannot be written; `path` is as it was.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise SnapshotError(f"{path} is a folder: name a file")
        if target.exists() and not target.is_file():
            raise SnapshotError(f"{path} is a device or a pipe: name a file")
        sweep(target.parent)  # which may make room
        free = shutil.disk_usage(target.parent).free
        if size > free:
            raise SnapshotError(
                f"{target} would take {readable(size)}, and its disk has {readable(free)} free: "
                "remove something (`kvlite library remove NAME`), or name a file elsewhere"
            )
        with replaced(target, private=True) as file:
            yield file
    except OSError as error:
        why = error.strerror or str(error)
        raise SnapshotError(
            f"{path} cannot be written ({why}); what was there still is: check the folder and its "
            "permissions, or name another"
        ) from error


def part_name(name: str, suffix: str = "") -> str:
    """A name for an unfinished file, which `sweep` removes once this program has ended."""
    return f".{name}.{os.getpid()}-{secrets.token_hex(4)}.part{suffix}"


def sweep(folder: Path) -> None:
    """Remove unfinished files of programs that have ended; raises OSError if there is no folder."""
    for file in folder.iterdir():
        match = _PART.fullmatch(file.name)
        if match is not None and not _writes(int(match[1]), file):
            with suppress(OSError):
                file.unlink()


def _writes(pid: int, file: Path) -> bool:
    """Whether the program that began a file may still run: another may have its number by now."""
    try:
        return bool(psutil.Process(pid).create_time() <= file.stat().st_mtime + 1)
    except (psutil.NoSuchProcess, FileNotFoundError, OverflowError):
        return False
    except (psutil.Error, OSError):
        return True


def _flush_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where folders can be flushed."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
