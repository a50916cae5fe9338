"""Progress and limits of reading one document, and what of it was not read."""

import lzma
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers.expat import ExpatError

from kvlite.errors import ContextError

ProgressCallback = Callable[[int, int], None]

# What parsers raise over damaged bytes besides their own errors; found by fuzzing them.
PARSER_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError),
    *(RuntimeError, StopIteration, TypeError, ValueError, lzma.LZMAError, zipfile.BadZipFile),
    *(zlib.error, ExpatError),
)


@dataclass
class Tracker:
    """Tracks the reading of one document.

    Attributes:
        label: the document's name in messages.
        limit: the most characters it may have.
        progress: called with how much is done, and of how much.
        ocr: whether pages that are pictures are read, too.
        encoding: that of text which says nothing of it; "" leaves it open.
        not_read: counts of what was skipped, by kind, such as "picture" or "attached file (a.doc)".
        scanned: the numbers of pages that are pictures and were skipped.
        assumed: how the text was taken where that may be wrong, such as "read as cp850".
        page_labels: what the pages are called, where that is not their number from 1.
    """

    label: str
    limit: int | None = None
    progress: ProgressCallback | None = None
    ocr: bool = False
    encoding: str = ""
    not_read: Counter[str] = field(default_factory=Counter)
    scanned: list[int] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    page_labels: tuple[str, ...] = ()
    _characters: int = 0

    def report(self, done: int, total: int) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(done, total)

    def add_characters(self, characters: int) -> None:
        """Count characters of text; the end of the last line may be counted in excess.

        Raises:
            ContextError: there are more than could fit.
        """
        self._characters += characters
        if self.limit is not None and self._characters > self.limit + 1:
            self.refuse(f"has {self._characters - 1:,} characters or more")

    def refuse(self, size: str) -> NoReturn:
        """Raises ContextError: the document's size is more than could fit."""
        raise ContextError(
            f"{self.label} {size}, and no more than {self.limit:,} characters could fit this "
            "model's context: split it, ask about a part of it, or use a model with a longer "
            "context."
        )

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was not read, such as "2 pictures" or "2 attached files (a.doc, b.doc)"."""
        kinds, names = Counter[str](), dict[str, list[str]]()
        for what, count in self.not_read.items():
            kind, named, name = what.partition(" (")
            kinds[kind] += count
            if named:
                names.setdefault(kind, []).append(name.removesuffix(")"))
        counted = [
            f"{count:,} {kind}{'s' * (count > 1)}"
            + (f" ({', '.join(names[kind])})" if kind in names else "")
            for kind, count in kinds.items()
            if count
        ]
        if self.scanned:
            pages, them = ("page", "it") if len(self.scanned) == 1 else ("pages", "them")
            remedy = "" if self.ocr else f" (the setting ocr reads {them})"
            counted.append(f"scanned {pages} {runs(self.scanned)}{remedy}")
        return tuple(counted)


def runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in few words, such as "2, 5-8"."""
    ends = [at for at, number in enumerate(numbers, 1) if numbers[at : at + 1] != [number + 1]]
    starts = [0, *ends[:-1]]
    pairs = [(numbers[start], numbers[end - 1]) for start, end in zip(starts, ends, strict=True)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
