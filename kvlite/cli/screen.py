"""Progress and answers as they come; signals and the keyboard."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from signal import SIGINT, SIGTERM
from threading import Event, Timer
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvlite.cli import TERMINATED
from kvlite.cli.console import Screen, print_json, write
from kvlite.cli.thinking import ThinkingLine
from kvlite.cli.word_wrap import WordWrap, part_wrapped
from kvlite.conversation.endings import cut
from kvlite.engine.callbacks import Callbacks

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from kvlite.conversation.metrics import GenerationMetrics, Piece
    from kvlite.conversation.session import Begin
    from kvlite.conversation.sources import Source

# Characters shown of the passage under an answer.
QUOTED = 60


def console(quiet: bool = False) -> Console:
    """Standard error as it is now, even if it is redirected later."""
    elsewhere = not sys.stderr.isatty()  # a file's lines are as long as they are
    return Screen(file=sys.stderr, quiet=quiet, soft_wrap=elsewhere)


class _Notes(logging.Handler):
    def __init__(self, screen: Console) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.print(f"Note: {record.getMessage()}", style="yellow")


def tell_of_compiling(screen: Console) -> None:
    """From now on, print a note when loops are compiled for so long that somebody wonders."""
    log = logging.getLogger("kvlite.compiling")
    log.handlers = [_Notes(screen)]
    log.setLevel(logging.INFO)


class ReadingBar:
    """A progress bar with the time left, for `engine.prefill.Progress`; gone once closed."""

    def __init__(self, screen: Console, title: str) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        shown = screen.is_terminal and not screen.quiet
        self._bar = Progress(*columns, console=screen, transient=True, disable=not shown)
        self._task = self._bar.add_task(title, total=None)
        self._bar.start()

    def update(self, done: int, total: int) -> None:
        """Show how much of the work is done."""
        self._bar.update(self._task, completed=done, total=total)

    def title(self, title: str) -> None:
        """Say what is done now."""
        self._bar.update(self._task, description=title)

    def note(self, note: str) -> None:
        """Print a note above the bar."""
        self._bar.console.print(f"Note: {note}", style="yellow")

    def close(self) -> None:
        """Take the bar off the screen; harmless to repeat."""
        self._bar.stop()


@contextmanager
def reading_bar(screen: Console, title: str) -> Iterator[ReadingBar]:
    """A progress bar that is closed at the latest when the block ends."""
    bar = ReadingBar(screen, title)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def reading(screen: Console, title: str = "Reading") -> Iterator[tuple[ReadingBar, Callbacks]]:
    """A progress bar, and callbacks that move it and are cancelled by Ctrl-C."""
    with stop_on_interrupt() as cancel, reading_bar(screen, title) as bar:
        yield bar, Callbacks(bar.update, bar.note, cancel)


def print_answer(
    begin: "Begin", screen: Console, as_json: bool, *, account: bool = True, sources: bool = False
) -> "GenerationMetrics":
    """Print an answer as it comes; unless `account` is False, a line on the screen stands for its
    reasoning, and after text another says what it was made from, and others which passages it came
    from: the best one, or if `sources` all that are known."""
    pieces, wrap = [], WordWrap() if sys.stdout.isatty() else None
    folds = account and not as_json
    with reading(screen) as (bar, callbacks), ThinkingLine(screen, folds=folds) as thinking:
        for piece in begin(callbacks):
            bar.close()
            pieces.append(piece)
            thinking.hear(piece.reasoning, piece.text, piece.reasoning_tokens)
            if not as_json:
                write(piece.text if wrap is None else wrap.push(piece.text))
    metrics = pieces[-1].metrics
    if as_json:
        said = answer_json(
            "".join(piece.text for piece in pieces), "".join(piece.reasoning for piece in pieces)
        )
        print_json({**said, **sources_json(pieces[-1]), **metrics.to_json()}, readable=True)
        return metrics
    write(f"{'' if wrap is None else wrap.flush()}\n")
    if account:
        print_account(pieces[-1], screen, sources=sources)
    return metrics


def print_account(last: "Piece", screen: Console, *, sources: bool) -> None:
    """Print what an answer was made from, by its last piece."""
    line = last.metrics.line()
    screen.print(part_wrapped(line) if screen.is_terminal else line, style="dim")
    if said := cut(last.metrics):
        screen.print(said, style="yellow")
    for line in source_lines(last.sources, whole=sources):
        screen.print(line, style="dim")


def source_lines(sources: "Sequence[Source]", *, whole: bool) -> list[str]:
    """The passages an answer came from as lines, or the beginning of the best one."""
    if whole:
        return [f"{number}. {each.line()}" for number, each in enumerate(sources, 1)]
    return [f"From {each.line(QUOTED)}" for each in sources[:1]]


def answer_json(text: str, reasoning: str) -> dict[str, Any]:
    """An answer, and what was thought before it, if anything was."""
    return {"answer": text} | ({"reasoning": reasoning} if reasoning else {})


def sources_json(last: "Piece") -> dict[str, Any]:
    """The passages an answer about documents came from, by its last piece."""
    return {"sources": [each.to_json() for each in last.sources]} if last.sources else {}


@contextmanager
def on_interrupt(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Ctrl-C calls `handler` while the block runs."""
    before = signal.signal(SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(SIGINT, before)


def guarded() -> AbstractContextManager[None]:
    """Ignore Ctrl-C between two things, as when an answer has just ended."""
    return on_interrupt(lambda number, frame: None)


@contextmanager
def stop_on_interrupt() -> Iterator[Event]:
    """The first Ctrl-C sets the event, so that nothing is lost; a second interrupts at once."""
    stop = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with on_interrupt(handle):
        yield stop


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM ends the program like an error: it tidies up, restores the terminal and removes
    temporary files. Where Python ignores exceptions, as in destructors, SIGTERM and Ctrl-C are
    raised once more."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(TERMINATED)

    def ignored(what: "sys.UnraisableHookArgs") -> None:
        if issubclass(what.exc_type, KeyboardInterrupt | SystemExit):
            number = SIGTERM if what.exc_type is SystemExit else SIGINT
            Timer(0.01, os.kill, [os.getpid(), number]).start()  # once this has returned
        else:
            hook(what)

    handler, hook = signal.signal(SIGTERM, end), sys.unraisablehook
    sys.unraisablehook = ignored
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(SIGTERM, handler)


@contextmanager
def unechoed() -> Iterator[None]:
    """Hide what is typed while the block runs; the next prompt gets it, even after Ctrl-C."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    quiet = [*before]
    quiet[3] = quiet[3] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)


def at_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin is not None and sys.stdin.isatty()


def lines_said(screen: Console, hint: str) -> Iterator[str]:
    """Lines until the input ends, without empty ones; a hint where somebody types them."""
    if not at_terminal():
        yield from filter(str.strip, sys.stdin or ())
        return
    from prompt_toolkit.history import InMemoryHistory

    screen.print(hint, style="dim")
    history = InMemoryHistory()
    while (said := line_typed(history=history)) is not None:
        if said.strip():
            yield said


def line_typed(default: str = "", history: "History | None" = None) -> str | None:
    """A line that somebody types, which is `default` at first; None if they leave."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    output = create_output(sys.stderr)
    try:
        return PromptSession[str]("? ", output=output, history=history).prompt(default=default)
    except (EOFError, KeyboardInterrupt):
        return None
