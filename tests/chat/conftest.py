"""A chat without a terminal: a model that loads in no time, and a list in place of a screen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from threading import Event

import pytest
from rich.console import RenderableType

import kvlite
from kvlite.cli.chat.commands import enter
from kvlite.cli.chat.terminal import ChatTerminal, T
from kvlite.cli.console import Screen
from kvlite.config.settings import Settings
from kvlite.conversation.metrics import GenerationMetrics
from kvlite.conversation.session import Begin, Session
from kvlite.engine.callbacks import Callbacks, Progress
from kvlite.errors import KvliteError


@dataclass
class Recorder(ChatTerminal):
    """A terminal that remembers.

    Attributes:
        shown: what was said and drawn, in order.
        answers: texts.
        makes: what a text that is asked for becomes.
    """

    width: int = 100
    shown: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    makes: str = ""
    asked: str = ""
    cancel: Event = field(default_factory=Event)

    def say(self, text: str) -> None:
        self.shown.append(text)

    def show(self, drawn: RenderableType) -> None:
        console = Screen(file=StringIO(), width=self.width, color_system=None)
        with console.capture() as captured:
            console.print(drawn)
        self.shown.append(captured.get())

    def answer(self, begin: Begin) -> GenerationMetrics:
        pieces = list(begin(Callbacks(lambda done, total: None, self.say, self.cancel)))
        self.answers.append("".join(piece.text for piece in pieces))
        return pieces[-1].metrics

    def work(self, title: str, work: Callable[[Callbacks], T]) -> T:
        return work(Callbacks(lambda done, total: None, self.say, self.cancel))

    def ask(self, prefill: str) -> str:
        self.asked = prefill
        return self.makes

    @contextmanager
    def leaving_on_interrupt(self, title: str) -> Iterator[Progress]:
        yield lambda done, total: None

    def clear(self) -> None:
        self.shown.append("(clear)")

    @property
    def last(self) -> str:
        return self.shown[-1]


@dataclass
class Chat:
    """A session at such a terminal."""

    session: Session
    terminal: Recorder

    def __call__(self, typed: str) -> str:
        """Type something; all that is said and drawn for it."""
        self.terminal.shown.clear()
        enter(self.session, self.terminal, typed)
        return "\n".join(self.terminal.shown)

    def refused(self, typed: str) -> str:
        """Type something that cannot be done; the sentence."""
        with pytest.raises(KvliteError) as error:
            enter(self.session, self.terminal, typed)
        assert "\n" not in str(error.value)
        return str(error.value)


@pytest.fixture(scope="session")
def runner(tiny_folder: Path) -> kvlite.Runner:
    return kvlite.load(str(tiny_folder), max_new_tokens=6)


@pytest.fixture
def chat(
    runner: kvlite.Runner, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Chat:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))
    given = Settings(model=str(tiny_folder), max_new_tokens=6)
    return Chat(Session(runner, given), Recorder())
