"""Conversions that stand for the real one, light enough for a child process to import at once."""

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvlite.model.gguf as conversion
from kvlite.errors import ModelError


def copied(gguf: Path, folder: Path) -> None:
    """What lies beside the file, in a folder called `made`."""
    for file in (gguf.parent / "made").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def endless(gguf: Path, folder: Path) -> None:
    """One that has begun, and never ends."""
    (folder / "model.safetensors").write_bytes(b"half")
    (gguf.parent / "begun").touch()
    time.sleep(600)


def here(work: Any, *given: Any, **_: Any) -> Any:
    """Instead of `run_in_child`."""
    return work(*given)


class _Fault:
    """Fails at one of the system calls by which something is made below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.error: BaseException | None = None
        self.at = self.count = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.error is None or not args or not str(args[0]).startswith(self.root):
            return
        if event not in ("os.mkdir", "os.rename", "open"):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self.count += 1
        if self.count == self.at:
            raise self.error

    @contextmanager
    def armed(self, at: int, error: BaseException) -> Iterator[None]:
        self.at, self.count, self.error = at, 0, error
        try:
            yield
        finally:
            self.error = None


def faults(gguf: str, cache: str) -> list[str]:
    """What was said when each system call of a conversion failed in each way, "" where it went
    well all the same, and what was left that should not be. Hooks stay, so a child process does
    this."""
    conversion.run_in_child, conversion._convert = here, copied
    os.environ["KVLITE_CACHE"] = cache
    root, said = Path(cache), list[str]()
    fault = _Fault(root)
    sys.addaudithook(fault)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, None):
        for at in range(1, 100):
            shutil.rmtree(root, ignore_errors=True)
            error = KeyboardInterrupt() if number is None else OSError(number, os.strerror(number))
            outcome = ""
            with fault.armed(at, error):
                try:
                    conversion.converted_folder(Path(gguf))
                except (ModelError, KeyboardInterrupt) as failed:
                    outcome = str(failed) or "interrupted"
            if fault.count < at:
                break
            left = [path.name for path in root.glob("models/*")]
            if outcome and left:
                outcome += f" LEFT {left}"
            folder = conversion.converted_folder(Path(gguf))
            assert [path.name for path in root.glob("models/*")] == [folder.name]
            said.append(outcome)
    return said
