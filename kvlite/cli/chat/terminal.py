"""The terminal that a chat runs in: one screen, one keyboard, Ctrl-C."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.text import Text

from kvlite.cli.chat.prompt import LinePrompt, Prompt
from kvlite.cli.chat.stream import MarkdownStream
from kvlite.cli.screen import on_interrupt, print_answer, reading, reading_bar, unechoed
from kvlite.cli.thinking import ThinkingLine
from kvlite.cli.word_wrap import part_wrapped
from kvlite.conversation.metrics import GenerationMetrics, brief
from kvlite.conversation.session import Begin
from kvlite.engine.callbacks import Callbacks, Progress

T = TypeVar("T")


class ChatTerminal:
    """A keyboard, and a screen that may be a file: for everything but answers, and for these too if
    standard output is a terminal. `status` makes a line of at most so many columns."""

    def __init__(
        self,
        screen: Console,
        prompt: Prompt | LinePrompt,
        status: Callable[[int], str],
        *,
        as_json: bool,
        quiet: bool,
    ) -> None:
        self.screen = screen
        self.prompt = prompt
        self.status = status
        self.as_json = as_json
        self.quiet = quiet

    @property
    def width(self) -> int:
        """Columns of the screen."""
        return self.screen.width

    def say(self, text: str) -> None:
        """Print a sentence that is not part of the conversation."""
        self.screen.print(Text(text, "dim"))

    def warn(self, text: str) -> None:
        """Print what went wrong."""
        self.screen.print(Text(text, "red"))

    def show(self, drawn: RenderableType) -> None:
        """Print a table."""
        self.screen.print(drawn)

    def clear(self) -> None:
        """Wipe the screen, if it can be wiped."""
        self.screen.clear()

    def read(self, hint: str = "") -> str:
        """Ask for the next message or command. Raises EOFError if the user leaves: Ctrl-D, or
        Ctrl-C twice where nothing is typed."""
        pressed = False
        while True:
            try:
                return self.prompt.read(hint=hint)
            except KeyboardInterrupt:
                if pressed and not self.prompt.typed:
                    raise EOFError from None
                pressed = not self.prompt.typed
                if pressed:
                    self.say("Ctrl-C once more quits, and so does Ctrl-D.")

    def ask(self, prefill: str) -> str:
        """Let the user edit a text; "" if they leave it with Ctrl-C or Ctrl-D."""
        try:
            return self.prompt.read(prefill)
        except (EOFError, KeyboardInterrupt):
            return ""

    def work(self, title: str, work: Callable[[Callbacks], T]) -> T:
        """Do something slow under a progress bar. Raises Stopped by Ctrl-C."""
        with unechoed(), reading(self.screen, title) as (_, callbacks):
            return work(callbacks)

    @contextmanager
    def leaving_on_interrupt(self, title: str) -> Iterator[Progress]:
        """A progress bar around work that cannot be stopped half-way: Ctrl-C ends the program."""
        with (
            on_interrupt(signal.default_int_handler),
            unechoed(),
            reading_bar(self.screen, title) as bar,
        ):
            yield bar.update

    def answer(self, begin: Begin) -> GenerationMetrics:
        """Show an answer while it comes, then what it was made from. Ctrl-C ends it and keeps the
        part that was written. Raises Stopped by Ctrl-C, before the first token."""
        apart = self.as_json or not sys.stdout.isatty()
        if not self.quiet and not apart:
            self.screen.print()
        if apart or self.screen.is_dumb_terminal:
            with unechoed():
                account = apart and not self.quiet
                metrics = print_answer(begin, self.screen, self.as_json, account=account)
        else:
            metrics = self._rendered(begin)
        if not self.quiet and not apart:
            self.screen.print()
            self.screen.print(Text(part_wrapped(brief(metrics)), "dim"))
            self.screen.print()
        return metrics

    def _rendered(self, begin: Begin) -> GenerationMetrics:
        stream: MarkdownStream | None = None
        with (
            unechoed(),
            reading(self.screen) as (bar, callbacks),
            ThinkingLine(self.screen, folds=not self.quiet) as thinking,
        ):

            def note(text: str) -> None:
                (bar if stream is None else stream).note(text)

            try:
                for piece in begin(Callbacks(bar.update, note, callbacks.cancel)):
                    bar.close()
                    thinking.hear(piece.reasoning, piece.text, piece.reasoning_tokens)
                    if stream is None and piece.text:
                        stream = MarkdownStream(self.screen, self.status)
                    if stream is not None:
                        stream.push(piece.text)
            finally:
                if stream is not None:
                    stream.close()
        return piece.metrics
