"""What is known of a file once it was read."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """The text of one file.

    `name` is the file's name without its folder, or "stdin". `page_starts` holds the character
    offset at which each page of `text` begins; it is empty for formats that have no pages.
    Lines end in a single newline. `not_read` says what the file holds besides, as "2 pictures".
    """

    name: str
    text: str
    page_starts: tuple[int, ...]
    not_read: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What of the file was not read, in a sentence; "" if that is nothing."""
        if not self.not_read:
            return ""
        *before, last = self.not_read
        if before:
            return f"{self.name}: {', '.join(before)} and {last} were not read"
        return f"{self.name}: {last} {'was' if last.startswith('1 ') else 'were'} not read"

    def page_of(self, offset: int) -> int | None:
        """Return the page, counted from 1, that a character offset lies on; None without pages.

        The end of the text counts as the last page. Raises ValueError if `offset` is outside it.
        """
        if not 0 <= offset <= len(self.text):
            raise ValueError(f"offset {offset} is outside the text's 0..{len(self.text)}")
        return bisect_right(self.page_starts, offset) or None


def whole_characters(text: str) -> str:
    """Text with a replacement character for halves of surrogate pairs, which no tokenizer takes.

    They come from broken font tables, and from names and arguments that are not UTF-8.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def one_kind_of_newline(text: str) -> str:
    """Text whose lines end in a single newline."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
