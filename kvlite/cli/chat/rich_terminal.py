"""The terminal that a chat runs in: one screen, one keyboard, Ctrl-C."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.text import Text

from kvlite.cli.answering import print_answer
from kvlite.cli.chat.lines import LinePrompt
from kvlite.cli.chat.prompt import Prompt
from kvlite.cli.chat.status import Gauge
from kvlite.cli.chat.stream import MarkdownStream, PlainStream, Shown
from kvlite.cli.chat.terminal import T, Work
from kvlite.cli.console import write
from kvlite.cli.screen import reading, reading_bar, stop_on_interrupt, unechoed
from kvlite.conversation.metrics import GenerationMetrics, brief
from kvlite.conversation.session import Begin
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prefill import Progress


class ChatTerminal:
    """A terminal whose keyboard is there; its screen may be a file.

    Attributes:
        screen: for all but answers, and for these too if standard output is a terminal.
    """

    def __init__(
        self,
        screen: Console,
        prompt: Prompt | LinePrompt,
        gauge: Gauge,
        *,
        as_json: bool,
        quiet: bool,
    ) -> None:
        self.screen = screen
        self.prompt = prompt
        self.gauge = gauge
        self.as_json = as_json
        self.quiet = quiet

    @property
    def width(self) -> int:
        """Columns of the screen."""
        return self.screen.width

    def say(self, text: str) -> None:
        """A sentence beside the conversation."""
        self.screen.print(Text(text, "dim"))

    def warn(self, text: str) -> None:
        """What went wrong."""
        self.screen.print(Text(text, "red"))

    def show(self, drawn: RenderableType) -> None:
        """A table or a picture."""
        self.screen.print(drawn)

    def clear(self) -> None:
        """Nothing is on the screen, where it can be wiped."""
        self.screen.clear()

    def ask(self, prefill: str) -> str:
        """What the user makes of a text; empty if they leave it, by Ctrl-C or Ctrl-D."""
        try:
            return self.prompt.read(prefill)
        except (EOFError, KeyboardInterrupt):
            return ""

    def work(self, title: str, work: Work[T]) -> T:
        """Do what takes a while under a bar."""
        with (
            unechoed(),
            stop_on_interrupt() as cancel,
            reading_bar(self.screen, title) as bar,
        ):
            return work(Callbacks(bar.update, bar.note, cancel))

    def answer(self, begin: Begin) -> GenerationMetrics:
        """Show an answer while it comes, then what it was made from."""
        if self.as_json or not sys.stdout.isatty():
            with unechoed():
                return print_answer(begin, self.screen, self.as_json, account=not self.quiet)
        if not self.quiet:
            self.screen.print()
        metrics = self._shown(begin)
        if not self.quiet:
            self.screen.print()
            self.screen.print(Text(brief(metrics), "dim"))
            self.screen.print()
        return metrics

    def _shown(self, begin: Begin) -> GenerationMetrics:
        stream: Shown | None = None
        with unechoed(), reading(self.screen) as (bar, cancel):

            def note(text: str) -> None:
                (bar.note if stream is None else stream.note)(text)

            try:
                for piece in begin(Callbacks(bar.update, note, cancel)):
                    if stream is None:
                        bar.close()
                        stream = self._stream()
                    stream.push(piece.text)
            finally:
                if stream is not None:
                    stream.close()
        return piece.metrics

    def _stream(self) -> Shown:
        if self.screen.is_dumb_terminal:
            return PlainStream(write, self.say)
        ascii_only = self.screen.options.ascii_only
        return MarkdownStream(
            self.screen, lambda width: self.gauge.line(width, ascii_only=ascii_only)
        )

    @contextmanager
    def leaving_on_interrupt(self, title: str) -> Iterator[Progress]:
        """A bar; Ctrl-C in here ends the program."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with unechoed(), reading_bar(self.screen, title) as bar:
                yield bar.update
        finally:
            signal.signal(signal.SIGINT, before)
