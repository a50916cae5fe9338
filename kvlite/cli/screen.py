"""What a command shows beside its result, on standard error: notices and progress."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM
from threading import Event, Timer
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvlite.cli import TERMINATED
from kvlite.cli.console import Screen


def console(quiet: bool = False) -> Console:
    """Standard error as it is now, whatever is redirected later."""
    return Screen(file=sys.stderr, quiet=quiet, soft_wrap=True)


class ReadingBar:
    """A bar for `engine.reading.Progress`, with the time left; gone once closed."""

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
        """So much of the work is done."""
        self._bar.update(self._task, completed=done, total=total)

    def note(self, note: str) -> None:
        """Something the user should know, above the bar."""
        self._bar.console.print(f"Note: {note}", style="yellow")

    def close(self) -> None:
        """Take the bar off the screen; harmless to repeat."""
        self._bar.stop()


@contextmanager
def reading_bar(screen: Console, title: str) -> Iterator[ReadingBar]:
    """A bar that is closed at the latest when the block ends."""
    bar = ReadingBar(screen, title)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def stop_on_interrupt() -> Iterator[Event]:
    """The first Ctrl-C sets the event, so that work stops where nothing is lost; a second one
    interrupts at once."""
    stop = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(SIGINT, before)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM ends the program as an error does: what it has begun is tidied up, the terminal
    shows again what is typed, and temporary files go. Where Python ignores what is raised, as in
    destructors, SIGTERM and Ctrl-C are raised once more."""

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
def reading(screen: Console) -> Iterator[tuple[ReadingBar, Event]]:
    """A bar while something is read, and what a Ctrl-C sets."""
    with stop_on_interrupt() as cancel, reading_bar(screen, "Reading") as bar:
        yield bar, cancel


@contextmanager
def unechoed() -> Iterator[None]:
    """What is typed in here does not show, and is there for the next prompt."""
    if sys.platform == "win32" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)


@contextmanager
def guarded() -> Iterator[None]:
    """A Ctrl-C that comes between two things, as when an answer has just ended, ends nothing."""
    before = signal.signal(SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(SIGINT, before)
