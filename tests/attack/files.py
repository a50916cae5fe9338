"""Damaged files, given in this process to the commands that read them."""

import io
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import gettempdir

import kvlite
from kvlite.cli.main import main
from tests.attack.inputs import MOST
from tests.documents.test_fuzz import KINDS, damaged
from tests.gguf_files import write_gguf

Command = tuple[str, ...]


def run(*args: str) -> tuple[int, str]:
    """The exit code of the program, and what it said on standard error."""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["kvlite", *args]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        return int(ended.code or 0), err.getvalue()
    except BaseException:
        return 1, err.getvalue() + traceback.format_exc()
    finally:
        sys.argv = before
    return 0, err.getvalue()


def flaw(code: int, said: str, took: float, codes: tuple[int, ...]) -> str:
    """What is wrong with an end of a command: "" if it is 0, or 2 and one sentence."""
    lines = [each for each in said.splitlines() if each.startswith("kvlite: ")]
    if code not in codes or "Traceback" in said:
        return f"exit code {code}: {said[-1500:]}"
    if code == 2 and (len(lines) != 1 or not said.rstrip().endswith(lines[0])):
        return f"not one sentence: {said[-600:]!r}"
    return f"{took:.1f} s" if took > MOST else ""


class Files:
    """Makes damaged files, and gives each to a command.

    Attributes:
        codes: how many ended with which exit code, by kind.
    """

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        self.model, self.folder, self.seed = str(model), folder, seed
        self.codes, self.found = Counter[str](), list[str]()
        self.text = folder / "text.txt"
        self.text.write_text("The heron stands in the water. " * 20)
        self._library = folder / "data" / "library"
        self._library.mkdir(parents=True)

    def run(self, count: int) -> None:
        """Give so many, a third of them of each kind."""
        kinds = (self._conversations(), self._models(), self._documents())
        before = os.environ.get("KVLITE_DATA")
        os.environ["KVLITE_DATA"] = str(self.folder / "data")
        try:
            for number in range(count):
                self._give(number, *next(kinds[number % 3]))
        finally:
            del os.environ["KVLITE_DATA"]
            if before is not None:
                os.environ["KVLITE_DATA"] = before
        print(f"{count} files: {dict(sorted(self.codes.items()))}", flush=True)

    def _give(self, number: int, path: Path, content: bytes, commands: list[Command]) -> None:
        path.write_bytes(content)
        rng = random.Random(f"{self.seed} {number}")
        command = rng.choice(commands)
        began = time.monotonic()
        code, said = run(*command)
        took = time.monotonic() - began
        self.codes[f"{path.suffix} {code}"] += 1
        codes = (0, 1, 2) if command[0] == "plan" else (0, 2)
        if wrong := flaw(code, said, took, codes):
            kept = Path(gettempdir(), f"found-{self.seed}-{number}{path.suffix}")
            kept.write_bytes(content)
            self.found.append(f"file {number} ({kept}) {' '.join(command)}: {wrong}")
        path.unlink()

    def _ask(self, *args: str) -> Command:
        return ("ask", *args, "a", "--max-tokens", "2", "-q")

    def _conversations(self) -> Iterator[tuple[Path, bytes, list[Command]]]:
        rng, sources = random.Random(f"{self.seed} kv"), self._saved()
        here, kept = self.folder / "a.kv", self._library / "b.kv"
        while True:
            source = rng.choice(sources)
            content = _spoilt(rng, source, rng.choice(sources))
            if rng.random() < 0.6:
                yield here, content, [self._ask(str(here), "--model", self.model)]
            else:
                asked = self._ask(str(self.text), "--model", self.model)
                yield kept, content, [("library",), asked]

    def _saved(self) -> list[bytes]:
        """Conversations as they are saved, whole and light."""
        runner = kvlite.load(self.model, method="snapkv:window=8", budget=48, max_new_tokens=2)
        talk, found = runner.conversation(recall="ram"), list[bytes]()
        list(talk.stream("One " * 20))
        list(talk.edit(1, "Other"))
        for light in (False, True):
            path = self.folder / "saved.kv"
            talk.save(path, light=light)
            found.append(path.read_bytes())
        return found

    def _models(self) -> Iterator[tuple[Path, bytes, list[Command]]]:
        rng, path = random.Random(f"{self.seed} gguf"), self.folder / "a.gguf"
        short = self.folder / "short.txt"
        short.write_text("a b")
        write_gguf(path)
        source = path.read_bytes()
        commands = [
            ("plan", str(path), "--context", "8", "--device", "cpu"),
            self._ask(str(short), "--model", str(path), "--method", "full"),
        ]
        header = source[: source.rindex(b"output") + 200]
        while True:
            content = _spoilt(rng, header, header) + source[len(header) :]
            yield path, content if rng.random() < 0.9 else content[: len(source) // 2], commands

    def _documents(self) -> Iterator[tuple[Path, bytes, list[Command]]]:
        rng = random.Random(f"{self.seed} documents")
        made = {name: KINDS[name](rng) for name in KINDS}
        while True:
            name = rng.choice([*made])
            path = self.folder / name
            asked = self._ask(str(path), "--model", self.model, "--method", "full")
            yield path, next(made[name]), [asked]


def _spoilt(rng: random.Random, source: bytes, other: bytes) -> bytes:
    """A file with a few bytes changed, moved or gone."""
    return damaged(source, rng, other, bytes(range(256)))
