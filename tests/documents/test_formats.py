"""Books, slides, FictionBooks, notebooks and mail: what is read, and in which order."""

import contextlib
import json
import re

import pytest

from kvlite.documents import read_document
from kvlite.errors import DocumentError

from .files import Save, refusal
from .formats import MESSAGE, ODF, P, book, deck, packed, parts_of, related, slide, text


def test_book_in_its_order(save: Save) -> None:
    read = read_document(save("a.epub", book()))
    assert read.text == "First\n\nIt begins.\n\nCaf\u00e9, the end."
    assert read.not_read == ("2 pictures",)


def changed(markup: str, new: str) -> bytes:
    """The book with another package."""
    parts = parts_of(book())
    opf = parts["in/book.opf"].decode()
    assert markup in opf
    return packed({**parts, "in/book.opf": opf.replace(markup, new)})


def test_a_books_pages_are_known_and_shown_as_readers_show_them(save: Save) -> None:
    page = (
        "<html><head><title/><link rel='stylesheet' href='s.css'/></head><body><p>One 10<span "
        "class='up'>6</span></p><svg><title>Two</title></svg><p>Three</p></body></html>"
    )
    parts = {
        **parts_of(book()),
        "in/one.xhtml": page.encode(),
        "in/s.css": b".up{vertical-align:super}",
    }
    opf = parts["in/book.opf"].decode()
    kinds = ('media-type="text/x-oeb1-document"', 'media-type="Application/XHTML+XML"', "")
    for kind in (*kinds, 'media-type="text/css"'):
        new = re.sub(r'(href="one.xhtml")\s*media-type="[^"]*"', rf"\1 {kind}", opf)
        assert new != opf
        changed = packed({**parts, "in/book.opf": new.replace("one.xhtml", "one.xhtml#start")})
        assert read_document(save("a.epub", changed)).text.startswith("One 10^6\n\nTwo\n\nThree")


def test_notes_of_a_book_come_last(save: Save) -> None:
    last = changed('<itemref idref="a"/>', '<itemref idref="a" linear="no"/>')
    assert read_document(save("b.epub", last)).text == "Caf\u00e9, the end.\n\nFirst\n\nIt begins."


def test_slides_are_pages_in_their_order(save: Save) -> None:
    read = read_document(save("a.pptx", deck()))
    assert read.text == "Opening\nwords\n\nNotes: Say hello\nx | y\n[Picture: A map]"
    assert read.page_starts == (0, read.text.index("x | y"))
    assert read.not_read == ("1 picture",)


def test_slides_keep_raised_text_formulas_and_merged_cells_apart(save: Save) -> None:
    def said(text: str, more: str = "") -> str:
        return f"<a:r><a:rPr {more}/><a:t>{text}</a:t></a:r>"

    def cell(text: str, more: str = "") -> str:
        return f"<a:tc {more}><a:txBody><a:p>{said(text)}</a:p></a:txBody></a:tc>"

    raised, lowered = said("6", 'baseline="30000"'), said("2", 'baseline="-25000"')
    half = (
        "<m:oMath xmlns:m='http://schemas.openxmlformats.org/officeDocument/2006/math'><m:f>"
        "<m:num><m:r><m:t>1</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f>"
        "</m:oMath>"
    )
    struck = said("50", 'strike="sngStrike"')
    rows = (
        cell("wide", 'gridSpan="2"') + cell("", 'hMerge="1"') + cell("x"),
        cell("tall", 'rowSpan="2"') + cell("1") + cell("y"),
        cell("", 'vMerge="1"') + cell("2") + cell("z"),
    )
    table = "".join(f"<a:tr>{row}</a:tr>" for row in rows)
    parts = parts_of(deck())
    parts["ppt/slides/slide1.xml"] = slide(
        f"<a:p>{said('10')}{raised}{said(' H')}{lowered}{said('O ')}{struck} {half}</a:p>"
        f"<a:tbl>{table}</a:tbl>"
    ).encode()
    read = read_document(save("a.pptx", packed(parts))).text
    assert read.endswith("10^6 H_2O ~~50~~ 1/2\nwide | wide | x\ntall | 1 | y\ntall | 2 | z")


def test_slides_show_levels_numbers_comments_and_their_title_first(save: Save) -> None:
    def said(text: str, properties: str = "") -> str:
        return f"<a:p>{properties}<a:r><a:t>{text}</a:t></a:r></a:p>"

    numbered = "<a:pPr lvl='1'><a:buAutoNum type='alphaLcParenR'/></a:pPr>"
    body = (
        said("Plan")
        + said("one", numbered)
        + said("two", numbered)
        + said("deep", "<a:pPr lvl='2'/>")
        + said("three", numbered)
        + said("point", "<a:pPr><a:buChar char='o'/></a:pPr>")
    )
    title = (
        "<p:sp><p:nvSpPr><p:nvPr><p:ph type='title'/></p:nvPr></p:nvSpPr><p:txBody>"
        f"{said('Title')}</p:txBody></p:sp>"
    )
    number = (
        f"<p:sp><p:nvPr><p:ph type='sldNum'/></p:nvPr><p:txBody>{said('Page')}</p:txBody></p:sp>"
    )
    parts = parts_of(deck())
    parts["ppt/slides/slide1.xml"] = slide(
        f"<p:spTree><p:sp><p:txBody>{body}</p:txBody></p:sp>{title}{number}</p:spTree>"
    ).encode()
    parts["ppt/slides/_rels/slide1.xml.rels"] = related(
        {"r1": ("comments", "../comments/c.xml")}
    ).encode()
    parts["ppt/comments/c.xml"] = (
        f"<p:cmLst {P}><p:cm><p:text>Why?</p:text></p:cm><p:cm><p:text>So.</p:text></p:cm>"
        "</p:cmLst>"
    ).encode()
    read = read_document(save("a.pptx", packed(parts))).text
    assert read.endswith(
        "Title\nPlan\n  a) one\n  b) two\n    - deep\n  c) three\n- point\n\nComments: Why?\nSo."
    )


def test_slides_raised_text_in_several_runs_is_one(save: Save) -> None:
    runs = "".join(f'<a:r><a:rPr baseline="30000"/><a:t>{each}</a:t></a:r>' for each in "123")
    parts = parts_of(deck())
    parts["ppt/slides/slide1.xml"] = slide(f"<a:p><a:r><a:t>10</a:t></a:r>{runs}</a:p>").encode()
    assert read_document(save("a.pptx", packed(parts))).text.endswith("10^123")


def test_fictionbook(save: Save) -> None:
    content = (
        '<?xml version="1.0" encoding="windows-1251"?><FictionBook '
        'xmlns="http://www.gribuser.ru/xml/fictionbook/2.0" xmlns:l="http://www.w3.org/1999/xlink">'
        "<description>no</description><body><section><title><p>\u0420\u0435\u043a\u0430</p></title>"
        "<p>It begins<a l:href='#n1' type='note'>1</a> 10<sup>6</sup> <strikethrough>50"
        "</strikethrough>.</p><table><tr><td>cell</td></tr></table></section></body>"
        "<body name='notes'><section id='n1'><p>Small.</p></section></body>"
        "<binary id='i'>AAAA</binary></FictionBook>"
    )
    assert read_document(save("a.fb2", content.encode("cp1251"))).text == (
        "\u0420\u0435\u043a\u0430\n\nIt begins [Note: Small.] 10^6 ~~50~~.\ncell"
    )
    secret = save("secret.txt", "secret")
    outer = f'<!DOCTYPE FictionBook [<!ENTITY x SYSTEM "file://{secret}">]>'
    entity = outer + "<FictionBook><body><section><p>a &x; b</p></section></body></FictionBook>"
    with contextlib.suppress(DocumentError):
        assert "secret" not in read_document(save("b.fb2", entity)).text
    assert "is damaged or no FictionBook" in refusal(save("c.fb2", "words"))


@pytest.mark.parametrize(
    ("data", "text", "not_read"),
    [
        ({"text/markdown": ["**5**"]}, "x\n\n**5**", ()),
        ({"text/latex": "$x^2$"}, "x\n\n$x^2$", ()),
        (
            {"text/plain": "<IPython.core.display.HTML object>", "text/html": "<b>5</b>"},
            "x\n\n5",
            (),
        ),
        ({"application/json": {"a": 1}}, "x", ("1 output (application/json)",)),
        ({"text/plain": "a", "application/json": {"a": 1}}, "x\n\na", ()),
    ],
)
def test_notebook_outputs(save: Save, data: object, text: str, not_read: tuple[str, ...]) -> None:
    cell = {"source": "x", "outputs": [{"output_type": "display_data", "data": data}]}
    read = read_document(save("a.ipynb", json.dumps({"cells": [cell]})))
    assert (read.text, read.not_read) == (text, not_read)


def test_notebook(save: Save) -> None:
    def cell(kind: str, source: str, **more: object) -> dict[str, object]:
        return {"cell_type": kind, "metadata": {}, "source": [source], **more}

    result = {"output_type": "stream", "name": "stdout", "text": ["hello\n"]}
    code = cell("code", "if x:\n    print('hello')", execution_count=1, outputs=[result])
    cells = [
        cell("markdown", "# Title\n10<sup>6</sup> words\n\n<div>a &amp; b</div>"),
        code,
        cell("raw", "as it is"),
    ]
    content = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    assert read_document(save("a.ipynb", json.dumps(content))).text == (
        "# Title\n10<sup>6</sup> words\n\n<div>a &amp; b</div>\n\nif x:\n    print('hello')\n\n"
        "hello\n\nas it is"
    )
    assert "is damaged or no Jupyter notebook" in refusal(save("b.ipynb", "words"))


def test_mail(save: Save) -> None:
    read = read_document(save("a.eml", MESSAGE))
    assert read.text == (
        "From: Ann <ann@example.org>\nTo: Bob <bob@example.org>\nSubject: Caf\u00e9 at noon\n\n"
        "We meet at the caf\u00e9.\n- bring money"
    )
    assert read.not_read == ("1 attached file (a.pdf)",)
    unknown = b"Subject: Hi\nContent-Type: text/plain; charset=banana\n\nWe meet."
    assert read_document(save("b.eml", unknown)).text == "Subject: Hi\n\nWe meet."


@pytest.mark.parametrize("name", ["a.odt", "a.epub", "a.pptx"])
def test_what_is_none_is_refused(save: Save, name: str) -> None:
    assert "is damaged or no" in refusal(save(name, "words"))


def test_what_is_locked_is_said(save: Save) -> None:
    manifest = (
        f'<m:manifest xmlns:m="{ODF}manifest:1.0"><m:file-entry><m:encryption-data/>'
        "</m:file-entry></m:manifest>"
    )
    locked = packed({**parts_of(text()), "META-INF/manifest.xml": manifest})
    assert "locked by a password" in refusal(save("a.odt", locked))
    sealed = '<encryption><m Algorithm="http://www.w3.org/2001/04/xmlenc#aes128-cbc"/></encryption>'
    assert "locked by its publisher" in refusal(
        save("a.epub", packed({**parts_of(book()), "META-INF/encryption.xml": sealed}))
    )
    assert "old PowerPoint file or locked" in refusal(
        save("a.pptx", b"\xd0\xcf\x11\xe0" + b"x" * 99)
    )


@pytest.mark.parametrize("name", ["a.odt", "a.epub"])
def test_what_unpacks_to_too_much_is_refused(save: Save, name: str) -> None:
    content = {"a.odt": text(), "a.epub": book()}[name]
    part = {"a.odt": "content.xml", "a.epub": "in/one.xhtml"}
    parts = parts_of(content)
    parts[part[name]] += b" " * (40 * 2**20)
    assert "times its size" in refusal(save(name, packed(parts)))
