"""Real documents beside what other programs read of them: no word is lost.

`make documents` fetches them; KVLITE_DOCUMENTS names another folder.
"""

import os
import re
import shutil
import subprocess
import unicodedata
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvlite.documents import read_document
from kvlite.errors import DocumentError

_FOLDER = Path(
    os.environ.get("KVLITE_DOCUMENTS", Path(__file__).parents[1] / ".cache" / "documents")
)
# Not imported, as other tests put another program in its place.
_PYPANDOC = Path(str(getattr(find_spec("pypandoc"), "origin", "")))
_PANDOC = [str(_PYPANDOC.parent / "files" / "pandoc"), "--sandbox", "-t", "plain", "--wrap=none"]
_JUDGES = {
    ".docx": [*_PANDOC, "-f", "docx"],
    ".odt": [*_PANDOC, "-f", "odt"],
    ".epub": [*_PANDOC, "-f", "epub"],
    ".fb2": [*_PANDOC, "-f", "fb2"],
    ".rtf": [*_PANDOC, "-f", "rtf"],
    ".pdf": ["pdftotext", "-layout"],
}
# Words that a judge has and kvlite rightly has not, by the document's name.
_RIGHT = {
    # Hidden text; letters between brackets that only a font of a web page knows.
    "libapache-poi-java-bug59058.docx": {
        *("expand", "collapse", "bottom", "1b", "ici", "piri", "piwi", "qiri", "qiwi"),
    },
    # Pictures, and words that run into each other.
    "unrtf-emfpict.rtf": {"image"},
    "latex2rtf-essential.rtf": {"texis", "texwon"},
    # Numbers of items within a table, which pandoc continues from column to column.
    "gutenprint-doc-gutenprint-users-manual.odt": {"14", "22", "23", "26", "28", "29", "31"},
}
# Formulas are written otherwise, and pandoc garbles text by its code page.
_OTHERWISE = {
    "fonts-texgyre-math-test-word-texgyre_termes_math.docx",
    "pandoc-features.epub",
    "latex2rtf-linux.rtf",
    "unrtf-cp1251-russian-alphabet.rtf",
}
_FILES = sorted(
    each
    for each in _FOLDER.glob("*")
    if each.suffix.lower() in _JUDGES and each.name not in _OTHERWISE
)


def _lost(judged: str, text: str, path: Path) -> set[str]:
    """Words that a text lacks; of a PDF, where words are broken by lines, letters and digits."""
    wanted = Counter(_parts(re.sub(r"\[\d+\]", "", judged), path))  # numbers of notes
    found = Counter(_parts(text, path) + _parts(re.sub(r"[\^_]\(?", "", text), path))
    if path.suffix.lower() != ".pdf":
        return {*wanted} - {*found}
    few = 0.01 * wanted.total() + 5
    return {f"{part} {count}" for part, count in (wanted - found).items() if count > few}


def _parts(text: str, path: Path) -> list[str]:
    plain = unicodedata.normalize("NFKC", text).replace("\xad", "").casefold()
    return re.findall(r"\w" if path.suffix.lower() == ".pdf" else r"[^\W_]+", plain)


def _judged(path: Path) -> str:
    command = _JUDGES[path.suffix.lower()]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    output = ["-"] if command[0] == "pdftotext" else []
    done = subprocess.run([*command, str(path), *output], capture_output=True, timeout=120)
    if done.returncode:
        pytest.skip(f"{command[0]} cannot read it: {done.stderr.decode()[:100]}")
    return done.stdout.decode(errors="replace")


@pytest.mark.skipif(not _FILES, reason="no real documents here: make documents")
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_no_word_is_lost(path: Path) -> None:
    judged = _judged(path)
    try:
        text = read_document(str(path)).text
    except DocumentError as error:
        assert "scan" in str(error) or not _lost(judged, "", path)
        return
    assert _lost(judged, text, path) <= _RIGHT.get(path.name, set())
