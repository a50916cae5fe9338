"""Messages from a terminal that can do nothing but print."""

import signal
import sys
from collections.abc import Callable

from kvlite.cli.chat.typed import unfinished


class LinePrompt:
    """Asks for messages, a line each, or several between three quotation marks."""

    typed = ""  # what Ctrl-C throws away is the terminal's, not ours

    def __init__(self, write: Callable[[str], None], mark: str) -> None:
        """Get ready.

        Args:
            write: shows the mark that stands before what is typed.
        """
        self.write = write
        self.mark = mark

    def read(self, prefill: str = "", hint: str = "") -> str:
        """What is typed.

        Args:
            prefill: shown before, since it cannot be edited.
            hint: likewise.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C.
        """
        for text in filter(None, (prefill, hint)):
            self.write(f"{text}\n")
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            text = self._line(self.mark)
            while unfinished(text):
                text += "\n" + self._line(" " * len(self.mark))
            return text
        except KeyboardInterrupt:
            self.write("\n")
            raise
        finally:
            signal.signal(signal.SIGINT, before)

    def _line(self, mark: str) -> str:
        self.write(mark)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")
