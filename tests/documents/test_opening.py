"""What may be opened, from where, and what is refused in one sentence."""

import codecs
import io
import os
import re
import socket
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlite.documents import Document, read_document, require_readable
from kvlite.errors import ContextError, DocumentError

from .files import Save, pdf, read_stdin, refusal, word

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="has no pipes in folders")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_stdin(monkeypatch, "Grüße\r\n".encode()) == Document("stdin", "Grüße\n", ())
    assert read_stdin(monkeypatch, pdf(["one", "two"])) == Document("stdin", "one\ntwo", (0, 4))
    content = word(lambda document: document.add_paragraph("hello"))
    assert read_stdin(monkeypatch, content).text == "hello"
    assert read_stdin(monkeypatch, b"\n<!doctype HTML><p>a<p>b").text == "a\n\nb"
    assert read_stdin(monkeypatch, b"<p>a fragment").text == "<p>a fragment"
    for bad in (b"", b" \n", b"\x7fELF\0\1", pdf(["x"])[:80], pdf([None])):
        with pytest.raises(DocumentError, match=r"^standard input "):
            read_stdin(monkeypatch, bad)


def test_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There is no file" in refusal(str(tmp_path / "none.txt"))
    monkeypatch.chdir(tmp_path)
    assert f"from {tmp_path}" in refusal("none.txt")
    (tmp_path / "file").write_text("x")
    assert "There is no file" in refusal("file/below.txt")


def test_file_one_may_not_read(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save("a.txt", "x")

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(DocumentError, match=r"may not be read by you.*chmod"):
        read_document(path)


@pytest.mark.parametrize("path", ["a" * 5000, "nul\0byte"])
def test_impossible_path(path: str) -> None:
    with pytest.raises(DocumentError, match=r"cannot be read \("):
        read_document(path)


BLANK = [
    (name, content) for name in ("a.pdf", "a.docx", "a.odt", "a") for content in (b"", b" \r\n\t")
]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *((name, content, "holds no text") for name, content in BLANK),
        ("a.txt", codecs.BOM_UTF16_LE + b"\n\0", "holds no text"),
        ("a.doc", b"even where the content is text", ".docx"),
        ("a.PPT", b"even where the content is text", ".pptx"),
        ("a.mobi", b"even where the content is text", "ebook-convert"),
        ("a.png", b"even where the content is text", "OCR"),
        ("a.tar.gz", b"even where the content is text", "unpack"),
        *(
            (name, b"\x7fELF some text\0 and more", "binary data")
            for name in ("a.txt", "a.html", "a.bin")
        ),
    ],
)
def test_what_is_no_text_is_refused(save: Save, name: str, content: bytes, said: str) -> None:
    assert said in refusal(save(name, content))


def test_other_archives_and_rich_text_are_known_by_their_contents(save: Save) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data.bin", "x")
    assert "binary data" in refusal(save("a.txt", out.getvalue()))
    assert read_document(save("b.txt", "<html><p>a")).text == "<html><p>a"
    assert read_document(save("a.txt", r"{\rtf1\ansi words}")).text == "words"


def test_parsers_are_imported_only_when_needed_and_torch_is_not(save: Save) -> None:
    code = (
        "import sys, kvlite.documents as d; d.read_document(sys.argv[1]); print({'pypdfium2', "
        "'docx', 'bs4', 'chardet', 'torch'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code, save("a.txt", "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture(params=["read", "require"])
def door(request: pytest.FixtureRequest) -> Callable[[str], object]:
    return {"read": read_document, "require": require_readable}[request.param]


@needs_posix
def test_only_regular_files_are_opened(tmp_path: Path, door: Callable[[str], object]) -> None:
    """A pipe that nobody writes to would block whoever opened it."""
    pipe, link, bound = (str(tmp_path / name) for name in ("pipe.txt", "link.txt", "socket"))
    os.mkfifo(pipe)
    os.symlink("/dev/zero", link)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(bound)
        for path, what in (
            (pipe, "is a pipe, not a file: give it as standard input, which is named -."),
            ("/dev/zero", "is a device, not a file"),
            (link, "is a device, not a file"),
            (bound, "is a socket, not a file"),
            (str(tmp_path), "is a folder"),
        ):
            with pytest.raises(DocumentError, match=re.escape(f"{path} {what}")):
                door(path)


@needs_posix
def test_a_file_that_becomes_a_pipe_is_not_waited_for(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pipe = save("a.txt", "x"), str(tmp_path / "pipe")
    os.mkfifo(pipe)
    found = os.stat(path)
    monkeypatch.setattr(os, "stat", lambda _: found)
    with pytest.raises(DocumentError, match="is a pipe"):
        read_document(pipe)


def sparse(path: Path, size: int, begins: bytes) -> str:
    with path.open("wb") as file:
        file.write(begins)
        file.truncate(size)
    return str(path)


@pytest.mark.parametrize(
    ("name", "begins", "size", "says"),
    [
        ("a.txt", b"words ", 200 * 10**6, "has 190.7 MiB, and kvlite reads at most 64.0 MiB"),
        ("a.md", b"# T", 65 * 2**20, "at most 64.0 MiB of text"),
        ("a.html", b"<p>", 65 * 2**20, "at most 64.0 MiB of HTML"),
        ("a.pdf", b"%PDF-", 201 * 2**20, "has 201.0 MiB, and kvlite reads at most 200.0 MiB"),
        ("a.txt", b"%PDF-", 201 * 2**20, "at most 200.0 MiB in one file"),
        ("a.docx", b"PK\3\4", 201 * 2**20, "at most 200.0 MiB in one file"),
        ("a.docx", b"", 201 * 2**20, "at most 200.0 MiB in one file"),
    ],
)
def test_what_is_larger_than_any_context_is_refused_by_its_size(
    tmp_path: Path, door: Callable[[str], object], name: str, begins: bytes, size: int, says: str
) -> None:
    path = sparse(tmp_path / name, size, begins)
    tracemalloc.start()
    try:
        with pytest.raises(DocumentError, match=re.escape(says)):
            door(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


class Endless:
    """Standard input that never ends."""

    def __init__(self, piece: bytes) -> None:
        self.piece, self.read = piece, 0
        self.buffer = self

    def read1(self, size: int) -> bytes:
        piece = (self.piece * (size // len(self.piece) + 1))[:size]
        self.read += size
        return piece


@pytest.mark.parametrize("piece", [b"\0", b"word ", b"%PDF-", b"PK\3\4"])
def test_endless_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    endless = Endless(piece)
    monkeypatch.setattr(sys, "stdin", endless)
    says = r"standard input has more than .*, the most that kvlite reads"
    with pytest.raises(DocumentError, match=says):
        read_document("-")
    assert endless.read <= 202 * 2**20


def test_text_that_cannot_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sparse(tmp_path / "a.txt", 40 * 10**6, b"words ")
    with pytest.raises(ContextError) as caught:
        read_document(path, limit=30_000)
    assert str(caught.value) == (
        f"{path} has 10,000,000 characters or more, and no more than 30,000 characters could fit "
        "this model's context: split it, ask about a part of it, or use a model with a longer "
        "context."
    )
    endless = Endless(b"words ")
    monkeypatch.setattr(sys, "stdin", endless)
    with pytest.raises(ContextError, match="characters or more"):
        read_document("-", limit=30_000)
    assert endless.read <= 2 * 2**20


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8", "utf-16", "utf-32", "gb18030"])
@pytest.mark.parametrize("text", ["x", "\r\n", "\N{PILE OF POO}", "中文文本测试,今天天气很好。"])
def test_text_that_just_fits_is_read_in_every_encoding(
    save: Save, encoding: str, text: str
) -> None:
    content = "Ab" + text * 500
    length = len(content.replace("\r\n", "\n"))
    path = save("a.txt", content.encode(encoding))
    named = encoding if encoding == "gb18030" else ""
    assert len(read_document(path, limit=length, encoding=named).text) == length
    with pytest.raises(ContextError, match=f"has {length:,} characters"):
        read_document(path, limit=length - 1, encoding=named)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.html", "<p>" + "word " * 100),
        ("a.pdf", pdf(["one " * 20] * 3)),
        ("a.docx", word(lambda document: document.add_paragraph("word " * 100))),
    ],
)
def test_what_does_not_fit_is_refused_in_every_format(
    save: Save, name: str, content: str | bytes
) -> None:
    path = save(name, content)
    assert len(read_document(path, limit=1000).text) < 1000
    with pytest.raises(ContextError, match=r"has \d+ characters.*no more than 100 characters"):
        read_document(path, limit=100)


def test_what_could_be_read_is_told_without_reading_it(save: Save) -> None:
    path = save("a.docx", "not really")
    require_readable(path)
    require_readable("-")
    with pytest.raises(DocumentError, match="There is no file"):
        require_readable(path + ".gone")
