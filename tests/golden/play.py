"""Plays a run, and notes after every step what can be compared."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import kvlite
from kvlite.errors import OutOfMemory

from . import probe


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random bytes as token ids; none of them is special to any of the models."""
    draw = Random(seed).randrange
    return [draw(256) for _ in range(count)]


def digest(plain: Any) -> str:
    """Anything plain, in 12 digits."""
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]


def kept(talk: kvlite.Conversation) -> list[str]:
    """For each layer its KV heads' numbers of entries, and a digest of which ones they are."""
    shown = []
    for layer in probe.kept_positions(talk):
        counts = " ".join(f"{len(layer[head])}" for head in sorted(layer))
        shown.append(f"{counts} {digest(sorted(layer.items()))}")
    return shown


@dataclass
class Play:
    """A conversation, and what is noted of it.

    Attributes:
        folder: an empty one, for files.
        steps: what was noted, in order.
    """

    runner: kvlite.Runner
    settings: dict[str, Any]
    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.talk = self.runner.conversation(**self.settings)

    def read(self, content: str | Sequence[int]) -> None:
        """Read without answering."""
        self.talk.read(content)
        self._note("read")

    def read_ahead(self, text: str) -> None:
        """Read what a message will begin with."""
        self._note("read_ahead", was_read=self.talk.read_ahead(text))

    def generate(self, ids: Sequence[int], **settings: Any) -> None:
        """Answer token ids."""
        try:
            answer = self.talk.generate(ids, ignore_eos=True, **settings)
        except OutOfMemory:
            self._note("generate", failed="out of memory")
        else:
            self._note("generate", answer.token_ids, answer.metrics)

    def say(self, text: str, **settings: Any) -> None:
        """Answer a message."""
        self._streamed("say", self.talk.stream(text, **settings))

    def ask_each(self, texts: Sequence[str], **settings: Any) -> None:
        """Answer several messages, each alone, in the same steps."""
        heard: list[list[kvlite.Piece]] = [[] for _ in texts]
        for index, piece in self.talk.ask_each(texts, **settings):
            assert isinstance(piece, kvlite.Piece), piece
            heard[index].append(piece)
        for pieces in heard:
            ids = [piece.token_id for piece in pieces]
            self._note("ask_each", ids, pieces[-1].metrics)

    def edit(self, number: int, text: str, **settings: Any) -> None:
        """Answer a message in other words."""
        self._streamed("edit", self.talk.edit(number, text, **settings))

    def regenerate(self, **settings: Any) -> None:
        """Answer the last message again."""
        self._streamed("regenerate", self.talk.regenerate(**settings))

    def check(self) -> None:
        """Answer the last message from everything."""
        self._streamed("check", self.talk.check())

    def undo(self) -> None:
        """Go back before the last message."""
        self._note("undo", returned=self.talk.undo())

    def branch(self, number: int) -> None:
        """Go back to an answer."""
        self.talk.branch(number)
        self._note("branch")

    def switch(self, number: int) -> None:
        """Go on with another branch."""
        self.talk.switch(number)
        self._note("switch")

    def reopen(self, light: bool = False) -> None:
        """Save, and go on with what was opened."""
        path = self.folder / "talk.kv"
        self.talk.save(path, light=light)
        self.talk = self.runner.open(path)
        self._note("reopen_light" if light else "reopen")

    def resume(self, path: Path) -> None:
        """Go on from a file that was saved at some time."""
        self.talk = self.runner.open(path)
        self._note("open")

    def _streamed(self, step: str, pieces: Iterable[kvlite.Piece]) -> None:
        heard = list(pieces)
        ids = [piece.token_id for piece in heard]
        self._note(step, ids, heard[-1].metrics, text=digest("".join(p.text for p in heard)))

    def _note(self, step: str, ids: Sequence[Any] = (), account: Any = None, **more: Any) -> None:
        noted: dict[str, Any] = {"step": step, **more}
        if account is not None:
            noted |= {"tokens": [*ids], "metrics": probe.metrics(account)}
        noted["context"] = f"{len(self.talk.token_ids)} {digest(self.talk.token_ids)}"
        if self.talk.messages:
            noted["messages"] = f"{len(self.talk.messages)} {digest(self.talk.messages)}"
            ways = [[way.current, way.messages] for way in self.talk.branches]
            noted["branches"] = f"{len(ways)} {digest(ways)}"
        noted["kept"] = kept(self.talk)
        self.steps.append(noted)


Script = Callable[[Play], None]


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """What differs between what was recorded and what is there, a line each."""
    if isinstance(expected, dict) and isinstance(found, dict):
        lines = []
        for key in dict.fromkeys([*expected, *found]):
            at = f"{where}.{key}" if where else str(key)
            if key not in found:
                lines.append(f"{at}: {expected[key]!r} recorded, now missing")
            elif key not in expected:
                lines.append(f"{at}: not recorded, now {found[key]!r}")
            else:
                lines += differences(expected[key], found[key], at)
        return lines
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [
            line
            for at, (one, other) in pairs
            for line in differences(one, other, f"{where}[{at}{_called(one)}]")
        ]
    return [] if expected == found else [f"{where}: {expected!r} recorded, now {found!r}"]


def _called(noted: Any) -> str:
    return f" {noted['step']}" if isinstance(noted, dict) and "step" in noted else ""
