"""Documents that pandoc reads, in a process of its own: its tree, written as our text."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from kvlite.documents.pandoc_text import PLAIN, PandocText
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

# A book of 320,000 words takes 5 seconds and 400 MB.
_SECONDS = 120
_HEAP = "600m"
# Objects in objects; pandoc nests three for each element.
_DEEPEST = 10_000
_HEAP_EXHAUSTED = 251
# What is longer than this in a formula is a word, and no sign that TeX has a name for.
LETTERS = 3


def pandoc_text(data: bytes, form: str, tracker: Tracker, *, gap: str = "\n\n") -> str:
    """The text of a document that is in one of pandoc's formats.

    Args:
        form: what pandoc calls it.
        gap: what stands between two paragraphs.

    Raises:
        DocumentError: pandoc is missing, or takes too long.
        MemoryError: it takes more memory than any document.
        ValueError: it cannot read the document.
        ContextError: the text is longer than could fit.
    """
    sys.setrecursionlimit(_DEEPEST)
    tree = json.loads(_tree(data, form, tracker, _SECONDS))
    counting = Tracker(tracker.label, tracker.limit, not_read=tracker.not_read)
    return PandocText(counting, gap).of(tree["blocks"])


def _tree(data: bytes, form: str, tracker: Tracker, seconds: float) -> bytes:
    """What pandoc makes of a document, as JSON."""
    spec = find_spec("pypandoc")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = (shutil.which("pandoc", path=f"{folder}/files") for folder in folders)
    program = next(filter(None, found), None)
    if program is None:
        raise DocumentError(
            f"{tracker.label} needs pandoc, which is missing: pip install pypandoc_binary."
        )
    arguments = [program, "--sandbox", "--preserve-tabs", "--track-changes=all"]
    with subprocess.Popen(
        [*arguments, "-f", form, "-t", "json", "+RTS", f"-M{_HEAP}", "-RTS"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        try:
            out, said = running.communicate(data, seconds)
        except subprocess.TimeoutExpired:
            running.kill()
            raise DocumentError(
                f"{tracker.label} takes more than {seconds} seconds to read: split it, or save it "
                "as text."
            ) from None
    if running.returncode in (_HEAP_EXHAUSTED, -9):
        raise MemoryError(f"pandoc takes more than {_HEAP}")
    if running.returncode:
        raise ValueError(said.decode(errors="replace"))
    tracker.not_read["part that pandoc warns of"] += len(re.findall(rb"(?m)^\[WARNING\]", said))
    return out


def with_lost(text: str, pieces: Iterable[str]) -> str:
    """A text, and under a line of their own the pieces of its document that it does not contain."""
    letters, at, lost = _letters(text), 0, list[str]()
    for piece in pieces:
        wanted = _letters(piece)
        found = letters.find(wanted, at)
        found = letters.find(wanted) if found < 0 else found
        if found < 0:
            lost.append(piece.strip())
        else:
            at = found
    return "\n".join([text, "", "Also in this file:", *lost]) if lost else text


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.translate(PLAIN))
