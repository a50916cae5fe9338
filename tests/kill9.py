"""kill -9 while something is read, answered or saved: `python -m tests.kill9 [SEED] [COUNT]`.

A command, or the app's service, works in a fork of this process, which has imported everything. It
is killed at a random moment, every second time soon after something was written. Then another fork
opens what there is: all that was finished before must be there. The same seed chooses the same
moments.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input

from kvlite.cli.main import main as kvlite_main
from kvlite.config.settings import Settings
from kvlite_app.engine.service import Service
from tests.cli.conftest import model_of

# Documents that are read again and again, and rounds after which another conversation begins.
DOCUMENTS, ROUNDS = 3, 8
# A kill may come a little later than the work usually takes; or up to so many seconds after a
# write, mostly at once.
LATER, SOON = 1.1, 0.05


@dataclass
class Done:
    """What a fork left: its exit code, None if it was killed, and what it printed."""

    code: int | None
    said: str


@dataclass
class Kept:
    """A data folder, and what was finished in it.

    Attributes:
        read: documents.
        saved: by the name of each conversation, how many messages.
        answered: the messages of each of the app's conversations.
    """

    folder: Path
    model: Path
    read: set[str] = field(default_factory=set)
    saved: dict[str, int] = field(default_factory=dict)
    answered: dict[str, list[str]] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """Where all of kvlite's is."""
        return self.folder / "data"

    def document(self, number: int) -> Path:
        """One of those that are read."""
        path = self.folder / f"text{number % DOCUMENTS}.txt"
        path.write_text(f"The cat number {number % DOCUMENTS} sat on the mat by the door. " * 40)
        return path

    def flags(self) -> list[str]:
        """Of all commands that answer."""
        return ["--model", str(self.model), "--budget", "64", "--max-tokens", "6"]


# --- what is killed -------------------------------------------------------------------------------


def command(*args: object) -> None:
    """The program, as it is run in a shell."""
    with patch.object(sys, "argv", ["kvlite", *map(str, args)]):
        kvlite_main()


def reads(kept: Kept, number: int) -> Callable[[], None]:
    """`kvlite read`, of a document that may have been read before."""
    return lambda: command("read", kept.document(number), *kept.flags())


def asks(kept: Kept, number: int) -> Callable[[], None]:
    """`kvlite ask`, about a document that may have been read."""
    return lambda: command("ask", kept.document(number), "Who sat?", *kept.flags())


def chats(kept: Kept, number: int) -> Callable[[], None]:
    """The chat at a terminal: a conversation goes on, and is saved again in place of the former."""
    name = f"trip{number // ROUNDS}"

    def typed() -> None:
        lines = (f"/load {name}", f"Hello {number}", f"/save {name}")
        with (
            patch("kvlite.cli.screen.at_terminal", lambda: True),
            patch("kvlite.cli.chat.command.at_terminal", lambda: True),
            create_pipe_input() as keyboard,
            create_app_session(input=keyboard),
        ):
            keyboard.send_text("".join(f"{line}\r" for line in lines) + "\x04")
            command("chat", *kept.flags())

    return typed


def says(kept: Kept, number: int) -> Callable[[], None]:
    """The app's service: three messages, each of which is on disk once it was waited for."""
    id = f"{number // ROUNDS:032x}"

    def said() -> None:
        service = Service(Settings(model=str(kept.model), max_new_tokens=4), kept.data)
        for each in range(3):
            text = f"Message {number}.{each}"
            service.say("", id, text).wait()
            print(f"answered {text}", flush=True)
        service.close()

    return said


# --- what is looked at afterwards -----------------------------------------------------------------


def note(kept: Kept, number: int, work: Any, done: Done) -> None:
    """Note what was finished, be it killed later."""
    if work is reads and (found := re.search(r"kept [\d.]+ \w+ as (\S+),", done.said)):
        kept.read.add(found[1])
    name = f"trip{number // ROUNDS}"
    if work is chats and f"Saved as {name}" in " ".join(done.said.split()):
        kept.saved[name] = kept.saved.get(name, 0) + 1
    if work is says:
        told = re.findall(r"answered (Message \S+)", done.said)
        kept.answered.setdefault(f"{number // ROUNDS:032x}", []).extend(told)


def look(kept: Kept, number: int, work: Any) -> None:
    """Open what there is, in a fork: raises AssertionError if something finished is not there."""
    if work is says:
        service = Service(Settings(model=str(kept.model), max_new_tokens=4), kept.data)
        for id, answered in kept.answered.items():
            said = [each.text for each in service.record("", id).said if each.role == "user"]
            assert [each for each in said if each in answered] == answered, (said, answered)
        id = f"{number // ROUNDS:032x}"
        service.say("", id, f"And after {number}?").wait()
        assert service.record("", id).said[-1].role == "assistant"
        service.close()
        return
    listing = fork(lambda: command("library", "--json"), kept.folder / "listing")
    assert listing.code == 0, listing.said
    entries = {each["name"]: each for each in json.loads(listing.said)["entries"]}
    assert not [each["flaw"] for each in entries.values() if each["flaw"]], listing.said
    assert kept.read <= entries.keys(), (kept.read, [*entries])
    for name, messages in kept.saved.items():
        assert entries[name]["messages"] >= messages, (entries[name], messages)
    name = f"trip{number // ROUNDS}"
    if work is chats and name in kept.saved:
        path = entries[name]["path"]
        asked = fork(lambda: command("ask", path, "Who?", *kept.flags()), kept.folder / "asked")
        assert asked.code == 0, asked.said
    document = kept.document(number)
    if work is not chats and document.name in kept.read:
        asked = fork(asks(kept, number), kept.folder / "asked")
        assert asked.code == 0 and f"Opened {document.name}" in asked.said, asked.said


# --- forks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """When a fork is killed: so many seconds after it began, or after a folder was written to."""

    seconds: float
    watched: Path | None = None

    def wait(self, child: int) -> None:
        """Return at that moment, or once the child has ended."""
        if self.watched is not None:
            before = _written(self.watched)
            while _written(self.watched) == before and not _has_ended(child):
                time.sleep(0.001)
        ended = time.monotonic() + self.seconds
        while time.monotonic() < ended and not _has_ended(child):
            time.sleep(0.001)


def _written(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            about = path.stat()
            found.append((str(path), about.st_size, about.st_mtime_ns))
    return sorted(found)


def fork(work: Callable[[], None], log: Path, killed: Moment | None = None) -> Done:
    """Work in a fork, whose output goes to a file, and kill it at a moment."""
    log.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _work(work, log)
    if killed is not None:
        killed.wait(child)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return Done(code, log.read_text(errors="replace") if log.exists() else "")


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _work(work: Callable[[], None], log: Path) -> None:
    code = 1
    try:
        with log.open("wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        torch.set_num_threads(1)
        work()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(folder: Path, seed: int, count: int) -> None:
    """Kill so many times before the work has ended. Raises AssertionError if something was lost."""
    for name in ("model", "data"):
        (folder / name).mkdir()
    os.environ |= {"KVLITE_DATA": str(folder / "data"), "KVLITE_CONFIG": str(folder / "config")}
    kept = Kept(folder, model_of(folder / "model", 32_768))
    with suppress(SystemExit):  # which imports what each fork would have to
        asks(kept, 0)()
    moments, kills = random.Random(seed), 0
    kinds, usual = (reads, asks, chats, says), dict[Any, float]()
    turns = itertools.count()
    while kills < count:
        number, kind = divmod(next(turns), len(kinds))
        work = kinds[kind]
        killed = None
        if number % 2:
            killed = Moment(SOON * moments.random() ** 3, kept.data)
        elif number:
            killed = Moment(moments.uniform(0, LATER * usual[work]))
        began = time.monotonic()
        done = fork(work(kept, number), folder / "log", killed)
        assert done.code in (None, 0), done.said
        usual.setdefault(work, time.monotonic() - began)
        note(kept, number, work, done)
        looked = fork(lambda: look(kept, number, work), folder / "looked")  # noqa: B023
        assert looked.code == 0, f"{work.__name__} {number}, killed at {killed}: {looked.said}"
        kills += done.code is None


def main() -> None:
    """Kill, and name what was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill9")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("count", type=int, nargs="?", default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), given.seed, given.count)
    print(f"nothing was lost in {given.count} kills ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
