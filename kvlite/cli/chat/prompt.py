"""The line that is typed: keys, history, completion, an editor."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer
from prompt_toolkit.completion import Completion as Offered
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.styles import Style

from kvlite.cli.chat.completion import completions
from kvlite.cli.chat.typed import unfinished
from kvlite.documents import whole_characters

_STYLE = Style.from_dict(
    {
        "prompt": "bold ansicyan",
        "placeholder": "ansibrightblack",
        "bottom-toolbar": "noreverse ansibrightblack",
    }
)


class Prompt:
    """Asks for messages, one after the other."""

    def __init__(
        self,
        history: History,
        status: Callable[[], str],
        *,
        mark: str = "> ",
        output: Output | None = None,
    ) -> None:
        """Get ready.

        Args:
            history: what was typed before.
            status: the line at the bottom.
            mark: what stands before what is typed.
            output: where to, if not to standard output.
        """
        self.status = status
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("class:prompt", mark)]),
            multiline=True,
            prompt_continuation=" " * len(mark),
            history=history,
            completer=_Completer(),
            complete_while_typing=False,
            key_bindings=_keys(),
            bottom_toolbar=self._toolbar,
            style=_STYLE,
            tempfile_suffix=".md",
            output=output,
        )

    def _toolbar(self) -> str:
        return self.status()

    @property
    def typed(self) -> str:
        """What is there, also when it was left."""
        return self._session.default_buffer.text

    def read(self, prefill: str = "", hint: str = "") -> str:
        """What is typed.

        Args:
            prefill: what is there to begin with.
            hint: shown as long as nothing is.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C; what was typed so far is in `typed`.
        """
        shown = FormattedText([("class:placeholder", hint)])
        return self._session.prompt(
            default=prefill,
            placeholder=lambda: "" if get_app().is_done else shown,
        )


class _Completer(Completer):
    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Any]:
        for found in completions(document.text_before_cursor):
            yield Offered(found.text, -found.replaces, display_meta=found.about)


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
    """What was typed on other days, in a file that only its owner may read; of today alone where
    nothing can be written."""
    path = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return _Kept(str(path))


class _Kept(FileHistory):
    """A full disk, or half a character, is no reason to end a chat."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(whole_characters(string))
