"""What of a document was not read is noted with the answer about it, once."""

import io
import json
import sys
from pathlib import Path

import pytest

from kvlite.documents import Document
from tests.cli.conftest import Run
from tests.documents.files import raw_word, run


def test_a_note_is_a_sentence() -> None:
    assert Document("a", "x", ()).note == ""
    assert Document("a", "x", (), ("1 picture",)).note == "a: 1 picture was not read"
    assert Document("a", "x", (), ("2 pictures",)).note == "a: 2 pictures were not read"
    three = ("1 picture", "1 chart", "3 footnotes")
    assert Document("a", "x", (), three).note == (
        "a: 1 picture, 1 chart and 3 footnotes were not read"
    )
    assert Document("a", "x", (), (), ("read as cp850",)).note == "a: read as cp850"
    assert Document("a", "x", (), ("1 chart",), ("read as cp850", "2 NULs left out")).note == (
        "a: read as cp850; 2 NULs left out; 1 chart was not read"
    )


def test_ask_and_read_say_it(
    kvlite: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))
    drawn = "<w:r><w:drawing><pic:pic/></w:drawing></w:r>"
    path = tmp_path / "report.docx"
    path.write_bytes(raw_word(f"<w:p>{run('The cat sat.')}{drawn}</w:p>"))
    flags = ("--model", model, "--max-tokens", "3")
    note = "report.docx: 1 picture was not read"
    asked = kvlite("ask", path, "Who?", *flags)
    assert (asked.code, asked.err.count(note)) == (0, 1)
    assert kvlite("ask", path, "Who?", *flags, "--json", "-q").json()["notes"] == [note]
    made = kvlite("read", path, *flags)
    assert (made.code, made.err.count(note)) == (0, 1)
    opened = kvlite("ask", path, "Who?", *flags)
    assert opened.err.count(note) == 1 and "Opened" in opened.err
    (file,) = (tmp_path / "data").rglob("*.kv")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\nAnd then?\n"))
    lines = kvlite("ask", file, *flags[2:], "--json", "-q").out.splitlines()
    assert [json.loads(line)["notes"] for line in lines] == [[note], []]
