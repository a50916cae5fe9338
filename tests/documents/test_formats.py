"""Books, slides, OpenDocument, rich text and mail: what is read, and in which order."""

import contextlib
import io
import json
import re
import zipfile
from collections.abc import Mapping

import pytest

from kvlite.documents import read_document
from kvlite.errors import DocumentError

from .files import Save, refusal

_ODF = "urn:oasis:names:tc:opendocument:xmlns:"
_SPACES = " ".join(
    f'xmlns:{name}="{_ODF}{name}:1.0"' for name in ("office", "text", "table", "style")
)
_SPACES += f' xmlns:draw="{_ODF}drawing:1.0" xmlns:svg="{_ODF}svg-compatible:1.0"'
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_P = (
    'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" '
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    f'xmlns:r="{OFFICE}"'
)


def packed(parts: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part, zipfile.ZIP_STORED if name == "mimetype" else None)
    return out.getvalue()


def parts_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def opendocument(body: str, styles: str = "") -> bytes:
    return packed(
        {
            "mimetype": "application/vnd.oasis.opendocument.text",
            "content.xml": f"<office:document-content {_SPACES}><office:automatic-styles>{styles}"
            f"</office:automatic-styles><office:body>{body}</office:body>"
            "</office:document-content>",
        }
    )


def text() -> bytes:
    return opendocument(
        "<office:text>"
        "<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>"
        "<text:h>Results</text:h><text:p>Growth<text:note><text:note-citation>1</text:note-citation>"
        "<text:note-body><text:p>Audited.</text:p></text:note-body></text:note> of"
        "<text:s/>12%.<text:line-break/>Next line</text:p>"
        '<text:list text:style-name="L1"><text:list-item><text:p>one</text:p></text:list-item>'
        "<text:list-item><text:p>two</text:p><text:list><text:list-item><text:p>inner</text:p>"
        "</text:list-item></text:list></text:list-item></text:list>"
        "<table:table><table:table-row>"
        "<table:table-cell><text:p>a</text:p></table:table-cell>"
        '<table:table-cell table:number-columns-repeated="2"/>'
        "<table:table-cell><text:p>b</text:p><text:p>c</text:p></table:table-cell>"
        "</table:table-row></table:table>"
        "<text:p><draw:frame><draw:image/><svg:title>t</svg:title><svg:desc>A cat</svg:desc>"
        "</draw:frame></text:p></office:text>",
        '<text:list-style style:name="L1"><text:list-level-style-number text:level="1" '
        'style:num-format="1"/><text:list-level-style-bullet text:level="2"/></text:list-style>',
    )


def book() -> bytes:
    return packed(
        {
            "META-INF/container.xml": '<container><rootfiles><rootfile full-path="in/book.opf"/>'
            "</rootfiles></container>",
            "in/book.opf": '<package><manifest><item id="b" href="two%20b.xhtml" '
            'media-type="application/xhtml+xml"/><item id="a" href="one.xhtml" '
            'media-type="application/xhtml+xml"/><item id="c" href="cover.svg" '
            'media-type="image/svg+xml"/></manifest><spine><itemref idref="c"/>'
            '<itemref idref="a"/><itemref idref="b"/></spine></package>',
            "in/one.xhtml": "<html><head><title>one.xhtml</title></head><body><h1>First</h1>"
            "<p>It begins.</p></body></html>",
            "in/two b.xhtml": "<html><body><p>Caf\u00e9, the end.</p><img src='x'/></body></html>",
        }
    )


def related(targets: Mapping[str, tuple[str, str]]) -> str:
    inside = "".join(
        f'<Relationship Id="{name}" Type="{OFFICE}/{kind}" Target="{target}"/>'
        for name, (kind, target) in targets.items()
    )
    return f"<Relationships>{inside}</Relationships>"


def _slide(inside: str) -> str:
    return f"<p:sld {_P}><p:cSld>{inside}</p:cSld></p:sld>"


def _said(*paragraphs: str) -> str:
    inside = "".join(f"<a:p><a:r><a:t>{each}</a:t></a:r></a:p>" for each in paragraphs)
    return f"<p:sp><p:txBody>{inside}</p:txBody></p:sp>"


def deck() -> bytes:
    """Two slides, shown in the other order than that of their names."""
    table = "".join(
        f"<a:tc><a:txBody><a:p><a:t>{each}</a:t></a:p></a:txBody></a:tc>" for each in "xy"
    )
    return packed(
        {
            "_rels/.rels": related({"r": ("officeDocument", "ppt/presentation.xml")}),
            "ppt/presentation.xml": f"<p:presentation {_P}><p:sldIdLst>"
            '<p:sldId id="256" r:id="r2"/><p:sldId id="257" r:id="r1"/>'
            "</p:sldIdLst></p:presentation>",
            "ppt/_rels/presentation.xml.rels": related(
                {"r1": ("slide", "slides/slide1.xml"), "r2": ("slide", "slides/slide2.xml")}
            ),
            "ppt/slides/slide1.xml": _slide(
                f"<a:tbl><a:tr>{table}</a:tr></a:tbl><p:pic><p:nvPicPr><p:cNvPr descr='A map'/>"
                "</p:nvPicPr></p:pic><a:p><a:fld><a:t>2</a:t></a:fld></a:p>"
            ),
            "ppt/slides/slide2.xml": _slide(_said("Opening", "words")),
            "ppt/slides/_rels/slide2.xml.rels": related(
                {"r1": ("notesSlide", "../notesSlides/n.xml")}
            ),
            "ppt/notesSlides/n.xml": _slide(_said("Say hello")),
        }
    )


RICH_TEXT = (
    rb"{\rtf1\ansi{\fonttbl{\f0 Arial;}}\pard Caf\'e9 \u8364? 5.{\footnote Small.}\par"
    rb"\trowd a\cell b\cell\row\trowd c\cell d\cell\row\pard end{\pict\pngblip 00}\par}"
)
MESSAGE = b"""From: Ann <ann@example.org>
To: Bob <bob@example.org>
Subject: =?utf-8?q?Caf=C3=A9_at_noon?=
Content-Type: multipart/mixed; boundary=B

--B
Content-Type: text/html; charset=utf-8
Content-Transfer-Encoding: quoted-printable

<p>We meet at the caf=C3=A9.</p><ul><li>bring money</li></ul>
--B
Content-Type: application/pdf
Content-Disposition: attachment; filename=a.pdf

JVBERi0=
--B--
"""


def test_opendocument_text(save: Save) -> None:
    read = read_document(save("a.odt", text()))
    assert read.text.splitlines() == [
        "Results",
        "",
        "Growth [Note: Audited.] of 12%.",
        "Next line",
        *("1. one", "2. two", "  - inner"),
        "a |  |  | b c",
        "",
        "[Picture: A cat]",
    ]
    assert read.not_read == ("1 picture",)
    assert read.page_starts == ()


def test_opendocument_raised_lowered_struck_and_hidden_text(save: Save) -> None:
    properties = {
        "up": 'style:text-position="super 58%"',
        "down": 'style:text-position="-33% 58%"',
        "gone": 'style:text-line-through-style="solid"',
        "off": 'text:display="none"',
    }
    styles = "".join(
        f'<style:style style:name="{name}"><style:text-properties {each}/></style:style>'
        for name, each in properties.items()
    )
    spans = {name: f'<text:span text:style-name="{name}">{{}}</text:span>' for name in properties}
    said = (
        f"10{spans['up'].format(6)} H{spans['down'].format(2)}O {spans['gone'].format(50)} 40"
        f"{spans['off'].format('no')}"
    )
    content = opendocument(f"<office:text><text:p>{said}</text:p></office:text>", styles)
    assert read_document(save("a.odt", content)).text == "10^6 H_2O ~~50~~ 40"


def test_opendocument_styles_of_a_kind_hidden_text_and_forms(save: Save) -> None:
    raised, struck = (
        f'<style:style style:name="{name}" style:family="{family}"><style:text-properties '
        f'style:text-{what}"/></style:style>'
        for name, family, what in (
            ("X", "text", 'position="super 58%'), ("Y", "paragraph", 'line-through-style="solid'),
        )
    )  # fmt: skip
    plain = '<style:style style:name="X" style:family="paragraph"/>'
    body = (
        '<office:forms xmlns:form="urn:oasis:names:tc:opendocument:xmlns:form:1.0"><form:form>'
        '<form:text form:id="a" form:current-value="Ann"/><form:password form:id="b" '
        'form:value="no"/>'
        '<form:checkbox form:id="c" form:label="Yes" form:current-state="checked"/><form:listbox '
        'form:id="d"><form:option form:label="one" form:current-selected="true"/><form:option '
        'form:label="two"/></form:listbox></form:form></office:forms>'
        '<text:p text:style-name="X">a<text:span text:style-name="X">2</text:span></text:p>'
        '<text:p text:style-name="Y">old</text:p>'
        '<text:p>b<text:hidden-text text:is-hidden="true">no</text:hidden-text></text:p>'
        '<text:p>no<text:hidden-paragraph text:is-hidden="true"/></text:p>'
        '<text:section text:display="condition" text:is-hidden="true"><text:p>no</text:p>'
        "</text:section><text:p>"
        + "".join(f'<draw:control draw:control="{each}"/>;' for each in "abcd")
        + "</text:p>"
    )
    read = read_document(save("a.odt", opendocument(body, raised + struck + plain)))
    assert read.text == "a^2\n\n~~old~~\n\nb\n\nAnn;;[x] Yes;one;"


def test_opendocument_cells_over_several_rows_or_columns_stand_in_each(save: Save) -> None:
    def cell(inside: str, more: str = "") -> str:
        return f"<table:table-cell {more}><text:p>{inside}</text:p></table:table-cell>"

    covered = "<table:covered-table-cell/>"
    rows = (
        cell("wide", 'table:number-columns-spanned="2"') + covered + cell("x"),
        cell("tall", 'table:number-rows-spanned="2"') + cell("1") + cell(""),
        covered + cell("2") + cell("y"),
    )
    inside = "".join(f"<table:table-row>{row}</table:table-row>" for row in rows)
    content = opendocument(f"<office:text><table:table>{inside}</table:table></office:text>")
    assert read_document(save("a.odt", content)).text == (
        "wide | wide | x\ntall | 1 |\ntall | 2 | y"
    )


def test_opendocument_headers_footers_and_formulas(save: Save) -> None:
    master = (
        f"<office:document-styles {_SPACES}><office:master-styles><style:header-style/>"
        "<style:header><text:p>Secret</text:p></style:header>"
        "<style:header-first><text:p>Secret</text:p></style:header-first>"
        "<style:footer><text:p>Page 1</text:p></style:footer>"
        "</office:master-styles></office:document-styles>"
    )
    half = (
        '<math xmlns="http://www.w3.org/1998/Math/MathML"><semantics><mfrac><mn>1</mn><mn>2</mn>'
        "</mfrac><annotation>1 over 2</annotation></semantics></math>"
    )
    body = (
        "<office:text><text:p>Ratio <draw:frame><draw:object xmlns:x='http://www.w3.org/1999/xlink'"
        " x:href='./Object 1'/><draw:image/></draw:frame>.</text:p></office:text>"
    )
    parts = {**parts_of(opendocument(body)), "styles.xml": master, "Object 1/content.xml": half}
    read = read_document(save("a.odt", packed(parts)))
    assert (read.text, read.not_read) == ("Secret\n\nRatio 1/2.\n\nPage 1", ())


def test_opendocument_numbers_are_those_shown(save: Save) -> None:
    def level(name: str, number: int, more: str) -> str:
        return f'<text:{name} text:level="{number}" style:num-format="1" {more}/>'

    def listed(inside: str, more: str = "") -> str:
        return f'<text:list text:style-name="L" {more}>{inside}</text:list>'

    def item(text: str, more: str = "") -> str:
        return f"<text:list-item {more}><text:p>{text}</text:p></text:list-item>"

    shown = 'text:display-levels="2"'
    styles = (
        f"<text:outline-style>{level('outline-level-style', 1, '')}"
        f"{level('outline-level-style', 2, shown)}</text:outline-style>"
        '<text:list-style style:name="L">'
        + level("list-level-style-number", 1, 'style:num-suffix=")" text:start-value="3"')
        + level("list-level-style-number", 2, shown)
        + "</text:list-style>"
    )
    deeper = f"<text:list-item>{listed(item('inner'))}</text:list-item>"
    body = (
        "<text:h>First</text:h>"
        '<text:list><text:list-item><text:list><text:list-item><text:h text:outline-level="2">Part'
        "</text:h></text:list-item></text:list></text:list-item></text:list>"
        + listed(item("three") + "<text:list-header><text:p>more</text:p></text:list-header>")
        + "<text:p>Between</text:p>"
        + listed(item("four") + deeper, 'text:continue-numbering="true"')
        + listed(item("ten", 'text:start-value="10"'))
    )
    content = opendocument(f"<office:text>{body}</office:text>", styles)
    assert read_document(save("a.odt", content)).text.split("\n") == [
        *("1 First", "", "1.1 Part", "3) three", "  more", "", "Between"),
        *("4) four", "  4.1. inner", "10) ten"),
    ]


def test_opendocument_comments_spaces_and_objects(save: Save) -> None:
    objects = "<draw:frame><draw:object xlink:href='./{}'/><draw:image/></draw:frame>"
    body = (
        "<office:text xmlns:xlink='http://www.w3.org/1999/xlink' "
        "xmlns:dc='http://purl.org/dc/elements/1.1/'>"
        "<text:p>a<text:s text:c='3'/>b<text:tab/>c<office:annotation><dc:creator>Ann</dc:creator>"
        "<text:p>Why?</text:p><text:p>So.</text:p></office:annotation> d</text:p>"
        f"<text:p>{objects.format('sheet')}</text:p><text:p>{objects.format('none')}</text:p>"
        "</office:text>"
    )
    cell = "<table:table-cell><text:p>7</text:p></table:table-cell>"
    sheet = opendocument(
        "<office:spreadsheet><table:table><table:table-row>"
        f"{cell * 2}</table:table-row></table:table></office:spreadsheet>"
    )
    parts = {**parts_of(opendocument(body)), "sheet/content.xml": parts_of(sheet)["content.xml"]}
    read = read_document(save("a.odt", packed(parts)))
    assert read.text == "a   b\tc [Comment by Ann: Why? So.] d\n7 | 7"
    assert read.not_read == ("1 embedded object",)


def test_opendocument_slides(save: Save) -> None:
    pages = "".join(f"<draw:page><text:p>{each}</text:p></draw:page>" for each in ("one", "two"))
    read = read_document(
        save("a.odp", opendocument(f"<office:presentation>{pages}</office:presentation>"))
    )
    assert (read.text, read.page_starts) == ("one\ntwo", (0, 4))


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


def test_a_damaged_part_of_a_book_is_left_out_and_named(save: Save) -> None:
    gone = changed('href="one.xhtml"', 'href="none.xhtml"')
    content = book()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        at = archive.getinfo("in/one.xhtml").header_offset + 30 + len("in/one.xhtml")
    broken = bytearray(content)
    broken[at + 5] ^= 0xFF
    for data, name in ((gone, "none.xhtml"), (bytes(broken), "one.xhtml")):
        read = read_document(save("a.epub", data))
        assert read.text == "Caf\u00e9, the end."
        assert f"1 damaged part ({name})" in read.not_read


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


def test_lists_of_a_books_pages_are_left_out_and_notes_come_last(save: Save) -> None:
    nav = changed('<item id="a" ', '<item id="a" properties="nav" ')
    assert read_document(save("a.epub", nav)).text == "Caf\u00e9, the end."
    last = changed('<itemref idref="a"/>', '<itemref idref="a" linear="no"/>')
    assert read_document(save("b.epub", last)).text == "Caf\u00e9, the end.\n\nFirst\n\nIt begins."


def test_slides_are_pages_in_their_order(save: Save) -> None:
    read = read_document(save("a.pptx", deck()))
    assert read.text == "Opening\nwords\n\nNotes: Say hello\nx | y\n[Picture: A map]"
    assert read.page_starts == (0, read.text.index("x | y"))
    assert read.not_read == ("1 picture",)


def test_a_row_of_a_slide_may_end_in_an_empty_cell(save: Save) -> None:
    parts = parts_of(deck())
    slide = parts["ppt/slides/slide1.xml"]
    parts["ppt/slides/slide1.xml"] = slide.replace(b"<a:t>y", b"<a:t>").replace(
        b"</a:tbl>", b"<a:tr><a:tc><a:p><a:t>z</a:t></a:p></a:tc><a:tc/></a:tr></a:tbl>"
    )
    assert "\nx |\nz |\n" in read_document(save("a.pptx", packed(parts))).text


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
    parts["ppt/slides/slide1.xml"] = _slide(
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
    parts["ppt/slides/slide1.xml"] = _slide(
        f"<p:spTree><p:sp><p:txBody>{body}</p:txBody></p:sp>{title}{number}</p:spTree>"
    ).encode()
    parts["ppt/slides/_rels/slide1.xml.rels"] = related(
        {"r1": ("comments", "../comments/c.xml")}
    ).encode()
    parts["ppt/comments/c.xml"] = (
        f"<p:cmLst {_P}><p:cm><p:text>Why?</p:text></p:cm><p:cm><p:text>So.</p:text></p:cm>"
        "</p:cmLst>"
    ).encode()
    read = read_document(save("a.pptx", packed(parts))).text
    assert read.endswith(
        "Title\nPlan\n  a) one\n  b) two\n    - deep\n  c) three\n- point\n\nComments: Why?\nSo."
    )


def test_slides_raised_text_in_several_runs_is_one(save: Save) -> None:
    runs = "".join(f'<a:r><a:rPr baseline="30000"/><a:t>{each}</a:t></a:r>' for each in "123")
    parts = parts_of(deck())
    parts["ppt/slides/slide1.xml"] = _slide(f"<a:p><a:r><a:t>10</a:t></a:r>{runs}</a:p>").encode()
    assert read_document(save("a.pptx", packed(parts))).text.endswith("10^123")


def test_rich_text(save: Save) -> None:
    read = read_document(save("a.rtf", RICH_TEXT))
    assert read.text.split("\n") == [
        "Caf\u00e9 \u20ac 5. [Note: Small.]", "a | b", "c | d", "end",
    ]  # fmt: skip
    assert read.not_read == ("1 picture",)
    beyond = rb"{\rtf1 Otto \u-10179?\u-8704? paid.}"
    assert read_document(save("b.rtf", beyond)).text == "Otto \U0001f600 paid."


def rich(save: Save, inside: bytes) -> str:
    return read_document(save("a.rtf", rb"{\rtf1\ansi\ansicpg1251 " + inside + b"}")).text


def test_rich_text_in_the_encoding_of_its_font(save: Save) -> None:
    sets = enumerate((204, 161, 128, 0))
    fonts = b"".join(b"{\\f%d\\fcharset%d A;}" % each for each in sets)
    text = (
        rb"\f0 \'cf\'f0\'e8\'e2\'e5\'f2 {\f1 \'c1\'e1}{\f2\'82\'a0\'83A} {\f3\'cf}"
        rb" \uc2\u8364\'80\'80x"
    )
    assert rich(save, rb"{\fonttbl" + fonts + b"}" + text) == (
        "\u041f\u0440\u0438\u0432\u0435\u0442 \u0391\u03b1\u3042\u30a2 \u041f \u20acx"
    )


def test_rich_text_raised_lowered_struck_and_hidden(save: Save) -> None:
    text = (
        rb"10{\super 6} H{\sub 2}O {\strike 5\'30} 40{\v no}{\deleted no} 1990{\up6 3}.\par"
        rb"{\*\bkmkstart x}{\field{\*\fldinst HYPERLINK no}{\fldrslt link}} \{b\}\bin4 no{}!"
    )
    assert rich(save, text) == "10^6 H_2O ~~50~~ 40 1990^3.\nlink {b}!"


def test_rich_text_signs_of_fonts_and_fields_of_forms(save: Save) -> None:
    fonts = rb"{\fonttbl{\f1\fcharset2 Symbol;}{\f2\fcharset2 Wingdings;}{\f3 Arial;}"
    fonts += rb"{\f4\fcharset2 OpenSymbol;}}"
    signs = rb"5 {\f1 m}m 5 {\f1\'6d}m {\f1\'b0}C {\f3 m}{\f4 m}{\listtext\f2\'a7}"
    assert rich(save, fonts + signs) == "- 5 \u03bcm 5 \u03bcm \u00b0C mm"
    read = read_document(
        save("a.rtf", b"{\\rtf1" + fonts + rb"a{\f2\'fe}{\mmath{\*\moMath{\mr b}}}}")
    )
    assert (read.text, read.not_read) == ("a", ("1 symbol", "1 formula"))
    field = rb"{\field{\*\fldinst FORM {\*\formfield{\fftype%s}}}{\fldrslt %s}}"
    for inside, result, shown in (
        (rb"1\ffres1\ffdefres0", b"", "[x]"), (rb"1\ffres25\ffdefres0", b"", "[ ]"),
        (rb"2\ffres1{\*\ffl one}{\*\ffl two}", b"", "two"), (rb"0\ffres0", b"Ann", "Ann"),
        (rb"2\ffres0{\*\ffl\f1 one}", b"", "one"),
    ):  # fmt: skip
        made = rich(save, fonts + b"A " + field % (inside, result) + b" B")
        assert made == f"A {shown} B"


def test_rich_text_headers_comments_lists_and_empty_cells(save: Save) -> None:
    text = (
        rb"{\header Head\par}{\footerf Foot}{\listtext 1.\tab}one{\*\annotation Why?\par So.}"
        rb"{\*\footnote F.}\par"
        rb"\trowd\cellx1\cellx2\pard\intbl a\cell\cell\row\intbl c\cell d\par e\cell\row"
        rb"\pard\par after"
    )
    assert rich(save, text) == (
        "Head\n1. one [Comment: Why? So.] [Note: F.]\na |\nc | d e\n\nafter\nFoot"
    )


def test_rich_text_merged_cells_list_levels_and_rows_within_notes(save: Save) -> None:
    text = (
        rb"\trowd\clvmgf\cellx1\cellx2\cellx3 tall\cell a\cell b\cell\row"
        rb"\trowd\clvmrg\cellx1\clmgf\cellx2\clmrg\cellx3 \cell wide\cell\cell\row"
        rb"\pard{\listtext\'b7\tab}one\par{\listtext a)\tab}\ilvl1 two{\upr{no}{\*\ud yes}}"
        rb"{\footnote\trowd x\cell y\cell\row}\par"
    )
    assert rich(save, text) == (
        "tall | a | b\ntall | wide | wide\n- one\n  a) twoyes [Note: x | y]"
    )


def test_rich_text_within_rich_text_without_end(save: Save) -> None:
    assert rich(save, rb"{\footnote a" * 30 + b"!").count("a") == 30


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


def test_fictionbook_named_styles_are_text(save: Save) -> None:
    body = "<FictionBook><body><p>a <style name='x'>b</style> c</p></body></FictionBook>"
    assert read_document(save("a.fb2", body)).text == "a b c"


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


def test_notebook_colours_are_no_text(save: Save) -> None:
    cell = {"source": "x", "outputs": [{"output_type": "stream", "text": "\x1b[1;31mred\x1b[0m"}]}
    assert read_document(save("a.ipynb", json.dumps({"cells": [cell]}))).text == "x\n\nred"


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
        f'<m:manifest xmlns:m="{_ODF}manifest:1.0"><m:file-entry><m:encryption-data/>'
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
