"""Damaged documents of every kind: read or refused in one sentence, in time, in little memory."""

import codecs
import io
import random
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pypdf import PdfReader, PdfWriter

from .files import encrypted, pdf, read_or_refuse, word
from .formats import MESSAGE, RICH_TEXT, book, deck, packed, parts_of, text
from .test_pdf import with_everything
from .test_sheets import workbook
from .test_word import example
from .test_word_parts import everything

INPUTS = 60
# Far above what any takes here, and far below what a hang or a bomb does.
SECONDS, MEMORY = 10, 200 * 2**20


def damaged(content: bytes, rng: random.Random, other: bytes, marks: bytes) -> bytes:
    """Content with bits flipped, cut, with pieces gone, doubled, from elsewhere, or confused."""
    mutant = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place, kind = rng.randrange(len(mutant) or 1), rng.randrange(7)
        size = rng.choice((1, 4, 30, 300))
        if kind == 0:
            del mutant[place:]
        elif kind == 1:
            del mutant[place : place + size]
        elif kind == 2 and mutant:
            mutant[place] ^= 1 << rng.randrange(8)
        elif kind == 3:
            begin = rng.randrange(len(other))
            mutant[place:place] = other[begin : begin + size]
        elif kind == 4:
            mutant[place:place] = mutant[place : place + size] * rng.choice((1, 3, 100))
        elif kind == 5:
            for at in [rng.randrange(len(mutant) or 1) for _ in range(size)] if mutant else ():
                mutant[at] = rng.choice(marks)
        else:
            digits = [at for at, byte in enumerate(mutant) if byte in b"0123456789"]
            for at in rng.sample(digits, min(3, len(digits))):
                mutant[at : at + 1] = rng.choice((b"-", b"9" * 10, b"0", b"1.5", b""))
    return bytes(mutant)


def pdfs(rng: random.Random) -> Iterator[bytes]:
    plain = pdf(["one", "two", None])
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(plain)))
    for page in writer.pages:
        page.compress_content_streams()
    out = io.BytesIO()
    writer.write(out)
    sources = [plain, plain, with_everything(), out.getvalue(), encrypted(plain, "", "AES-256")]
    while True:
        yield damaged(rng.choice(sources), rng, rng.choice(sources), b"0123456789<>[]()/R -")


def archives(rng: random.Random) -> Iterator[bytes]:
    """Half of them sound archives of damaged parts."""
    sources = [word(example), everything()]
    while True:
        content = rng.choice(sources)
        if rng.random() < 0.5:
            yield damaged(content, rng, rng.choice(sources), bytes(range(256)))
            continue
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
            names = [name for name in old.namelist() if name.endswith((".xml", ".rels"))]
            chosen = rng.choice(names)
            for name in names:
                part = old.read(name)
                if name == chosen:
                    part = damaged(part, rng, old.read(rng.choice(names)), b'<>/=&;:w"!?-')
                new.writestr(name, part)
        yield out.getvalue()


def pages(rng: random.Random) -> Iterator[bytes]:
    tags = "p div ul ol li table tr td pre br img svg video textarea select option template script"
    names = [
        *tags.split(),
        "details",
        "input",
        "title",
        "a",
        "b",
        "x:y",
        "",
        "!--",
        "![CDATA[",
        "?",
    ]
    values = ("1", "-9", "hidden", "checkbox", "x y", "&lt;", "\1", "9" * 30)
    while True:
        soup = ""
        for _ in range(rng.randrange(200)):
            name, value = rng.choice(names), rng.choice(values)
            pieces = [
                f"<{name}>",
                f"</{name}>",
                f"<{name}>" * 50,
                "words ",
                "]]>",
                " \n",
                "&bogus;",
            ]
            pieces += [f"<{name} start={value} value='{value}' type={value}>", "\u4e16\U0001f600\1"]
            pieces += [f"<{name} alt={value} hidden", "&#x110000;&nbsp;"]
            soup += rng.choice(pieces)
        begins = rng.choice(("", "<!doctype html>", '<?xml version="1.0"?>', '<meta charset="x">'))
        content = (begins + soup).encode(rng.choice(("utf-8", "utf-16", "utf-32")))
        yield damaged(content, rng, b"<a " * 200, b"<>/=&;:-!?") if content else b"<"


def texts(rng: random.Random) -> Iterator[bytes]:
    encodings = ("utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1251", "cp1252", "gb18030", "cp932")
    letters = "words \r\n\t\u0416\u4e16\u754c\xe9\U0001f600\ud800\0"
    marks = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF32_BE, b"PK\3\4", b"%PDF-", b"\0")
    while True:
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(1, 400)))
        content = text.encode(rng.choice(encodings), "replace")
        content = damaged(content, rng, content, bytes(range(256)))
        yield rng.choice((b"", b"", rng.choice(marks))) + content


def check(path: Path, made: Iterator[bytes], count: int) -> int:
    """How many of them were read."""
    read = 0
    for number in range(count):
        content = next(made)
        path.write_bytes(content)
        sampled = number % 20 == 0
        if sampled:
            tracemalloc.start()
        started = time.thread_time()
        try:
            read += read_or_refuse(str(path))
            assert time.thread_time() - started < SECONDS
            assert not sampled or tracemalloc.get_traced_memory()[1] < MEMORY
        except BaseException:
            print(f"input {number}: {content!r}")
            raise
        finally:
            tracemalloc.stop()
    return read


def books(rng: random.Random) -> Iterator[bytes]:
    """All of them sound archives of damaged parts, which have little text of their own."""
    sources = [text(), book(), deck(), workbook()]
    while True:
        parts = parts_of(rng.choice(sources))
        chosen = rng.choice([*parts])
        parts[chosen] = damaged(parts[chosen], rng, rng.choice([*parts.values()]), b'<>/=&;:"!?-')
        yield packed(parts)


def messages(rng: random.Random) -> Iterator[bytes]:
    while True:
        yield damaged(MESSAGE, rng, MESSAGE, b'\n:;="-')


def rich_texts(rng: random.Random) -> Iterator[bytes]:
    while True:
        yield damaged(RICH_TEXT, rng, RICH_TEXT, b"\\{} '0a|")


KINDS: dict[str, Callable[[random.Random], Iterator[bytes]]] = {
    "a.pdf": pdfs,
    "a.docx": archives,
    "a.html": pages,
    "a.odt": books,
    "a.eml": messages,
    "a.rtf": rich_texts,
    "a.txt": texts,
}


@pytest.mark.parametrize("name", KINDS)
def test_damaged_documents_are_read_or_refused(tmp_path: Path, name: str) -> None:
    assert 0 < check(tmp_path / name, KINDS[name](random.Random(2)), INPUTS) < INPUTS
