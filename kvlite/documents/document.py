"""The result of reading a file."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvlite.config.checked_file import Damaged, of_type, sound

# How `not_read` begins with one thing.
_ONE = "1 ", "scanned page "


@dataclass(frozen=True)
class Document:
    """The text of one file.

    Attributes:
        name: the file's name without its folder, or "stdin".
        text: lines end in a single newline.
        page_starts: the character offset at which each page begins; empty for formats without
            pages.
        not_read: what else the file holds, such as "2 pictures".
        assumed: how it was read where that may be wrong, such as "read as cp850".
        page_labels: what pages are called, such as "iv"; empty if that is their number.
        excerpt: where parts of a longer document begin in the text, and in words where they are in
            the whole; empty for a whole one.
    """

    name: str
    text: str
    page_starts: tuple[int, ...]
    not_read: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    page_labels: tuple[str, ...] = ()
    excerpt: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        # Wherever it is shown, and in prompts, a name is one line.
        object.__setattr__(self, "name", " ".join(self.name.splitlines()))

    @property
    def note(self) -> str:
        """What was assumed of the file and what of it was not read; "" if there is neither."""
        said = [*self.assumed]
        if self.not_read:
            *before, last = self.not_read
            were = "were" if before or not last.startswith(_ONE) else "was"
            said.append(f"{' and '.join(filter(None, (', '.join(before), last)))} {were} not read")
        return f"{self.name}: {'; '.join(said)}" if said else ""

    def page_of(self, offset: int) -> int | None:
        """The page, from 1, that a character offset is on; None without pages.

        Raises:
            ValueError: `offset` is outside the text; its end counts as the last page.
        """
        if not 0 <= offset <= len(self.text):
            raise ValueError(f"offset {offset} is outside the text's 0..{len(self.text)}")
        return bisect_right(self.page_starts, offset) or None

    def page_label(self, offset: int) -> str:
        """What the page that a character offset is on is called; "" without pages."""
        page = self.page_of(offset)
        return self.page_labels[page - 1] if page and self.page_labels else str(page or "")

    @classmethod
    def from_plain(cls, plain: Any) -> "Document":
        """The inverse of `asdict`, of a file's values. Raises Damaged."""
        with sound():
            starts = tuple(of_type(int, each) for each in plain["page_starts"])
            not_read, assumed, labels = (
                tuple(of_type(str, text) for text in plain.get(each, ()))
                for each in ("not_read", "assumed", "page_labels")
            )
            excerpt = tuple(
                (of_type(int, start), of_type(str, where))
                for start, where in plain.get("excerpt", ())
            )
            name, text = of_type(str, plain["name"]), of_type(str, plain["text"])
            made = cls(name, text, starts, not_read, assumed, labels, excerpt)
            if any(one > other for one, other in pairwise((0, *starts, len(made.text)))):
                raise Damaged("its pages are not in order")
            return made


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which no tokenizer takes: they come from broken font tables, and
    from names and arguments that are not UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def one_kind_of_newline(text: str) -> str:
    """Text whose lines end in a single newline."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
