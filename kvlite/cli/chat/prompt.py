"""Where messages are typed: keys, history, completion, an editor; or plain lines."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.styles import Style
from rich.console import Console

from kvlite.cli.chat.completion import ChatCompleter
from kvlite.cli.chat.typed import unfinished
from kvlite.cli.screen import on_interrupt
from kvlite.config.paths import data_folder
from kvlite.documents import whole_characters

_STYLE = Style.from_dict(
    {
        "prompt": "bold ansicyan",
        "placeholder": "ansibrightblack",
        "bottom-toolbar": "noreverse ansibrightblack",
    }
)


class Prompt:
    """Asks for messages, above a status line."""

    def __init__(
        self, history: History, status: Callable[[], str], mark: str, output: Output | None
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("class:prompt", mark)]),
            multiline=True,
            prompt_continuation=" " * len(mark),
            history=history,
            completer=ChatCompleter(),
            complete_while_typing=False,
            key_bindings=_keys(),
            bottom_toolbar=status,
            style=_STYLE,
            tempfile_suffix=".md",
            output=output,
        )

    @property
    def typed(self) -> str:
        """What has been typed, even if it was left by Ctrl-C."""
        return self._session.default_buffer.text

    def read(self, prefill: str = "", hint: str = "") -> str:
        """Ask for a message. Raises EOFError at Ctrl-D, and KeyboardInterrupt at Ctrl-C; the text
        so far is in `typed`.

        Args:
            prefill: text to begin with.
            hint: shown while the line is empty.
        """
        shown = FormattedText([("class:placeholder", hint)])
        return self._session.prompt(
            default=prefill,
            placeholder=lambda: "" if get_app().is_done else shown,
        )


class LinePrompt:
    """The same for a terminal that can only print: a line each, or several in quotation marks."""

    typed = ""  # the terminal drops what is typed when Ctrl-C is pressed

    def __init__(self, write: Callable[[str], None], mark: str) -> None:
        self.write = write
        self.mark = mark

    def read(self, prefill: str = "", hint: str = "") -> str:
        """As `Prompt.read`; `prefill` cannot be edited, so it is shown above."""
        for text in filter(None, (prefill, hint)):
            self.write(f"{text}\n")
        with on_interrupt(signal.default_int_handler):
            try:
                text = self._line(self.mark)
                while unfinished(text):
                    text += "\n" + self._line(" " * len(self.mark))
                return text
            except KeyboardInterrupt:
                self.write("\n")
                raise

    def _line(self, mark: str) -> str:
        self.write(mark)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def prompt_on(screen: Console, status: Callable[[int], str]) -> Prompt | LinePrompt:
    """What asks for messages, as far as the terminal goes."""
    mark = "> " if screen.options.ascii_only else "\u203a "
    if screen.is_dumb_terminal:
        return LinePrompt(lambda text: screen.out(text, end="", highlight=False), mark)
    return Prompt(
        history_in(data_folder()),
        lambda: status(screen.width),
        mark,
        None if sys.stdout.isatty() else create_output(sys.stderr),
    )


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion:
            buffer.complete_state = None  # takes what is chosen
        elif unfinished(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-g")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    return keys


def history_in(folder: Path) -> History:
    """What was typed on other days, in a file of the user's alone; in memory if need be."""
    path = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return _Kept(str(path))


class _Kept(FileHistory):
    """A history that goes on when the disk is full, or when a character is cut in half."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(whole_characters(string))
