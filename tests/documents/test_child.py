"""The process that reads a document: stopped, limited, and what passes through it."""

import sys
from pathlib import Path
from threading import Event, Timer

import pytest

from kvlite.documents import read_document, reading
from kvlite.errors import ContextError, DocumentError, Stopped

from .files import Save, Stdin, pdf

pytestmark = pytest.mark.usefixtures("in_child")


def test_progress_refusals_and_standard_input_pass_through(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = save("a.pdf", pdf(["one", "two", None])), list[tuple[int, int]]()
    read_document(path, progress=lambda *at: told.append(at))
    assert told[0] == (1, 3)  # the others may come too soon to be seen
    with pytest.raises(ContextError, match="no more than 3 characters"):
        read_document(path, limit=3)
    with pytest.raises(DocumentError, match="There is no file"):
        read_document(path + ".gone")
    monkeypatch.setattr(sys, "stdin", Stdin(b"piped"))
    assert read_document("-").text == "piped"


def test_it_is_stopped_wherever_it_is(save: Save) -> None:
    """Nothing in the library that takes this page apart looks at who follows."""
    path, cancel = save("a.pdf", pdf(["one"]).replace(b"(one) Tj", b"(one) Tj " * 400_000)), Event()
    Timer(1, cancel.set).start()
    with pytest.raises(Stopped):
        read_document(path, cancel=cancel)


@pytest.mark.skipif(sys.platform != "linux", reason="limits are held to there")
def test_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MEMORY", 100 * 2**20)
    path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 10_000_000)
    with pytest.raises(DocumentError, match="takes more memory to open than there is"):
        read_document(str(path))
