"""Small files of several formats."""

import io
import zipfile
from collections.abc import Mapping

ODF = "urn:oasis:names:tc:opendocument:xmlns:"


SPACES = " ".join(
    f'xmlns:{name}="{ODF}{name}:1.0"' for name in ("office", "text", "table", "style")
)


SPACES += f' xmlns:draw="{ODF}drawing:1.0" xmlns:svg="{ODF}svg-compatible:1.0"'


OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


P = (
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
            "content.xml": f"<office:document-content {SPACES}><office:automatic-styles>{styles}"
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


def slide(inside: str) -> str:
    return f"<p:sld {P}><p:cSld>{inside}</p:cSld></p:sld>"


def said_in(*paragraphs: str) -> str:
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
            "ppt/presentation.xml": f"<p:presentation {P}><p:sldIdLst>"
            '<p:sldId id="256" r:id="r2"/><p:sldId id="257" r:id="r1"/>'
            "</p:sldIdLst></p:presentation>",
            "ppt/_rels/presentation.xml.rels": related(
                {"r1": ("slide", "slides/slide1.xml"), "r2": ("slide", "slides/slide2.xml")}
            ),
            "ppt/slides/slide1.xml": slide(
                f"<a:tbl><a:tr>{table}</a:tr></a:tbl><p:pic><p:nvPicPr><p:cNvPr descr='A map'/>"
                "</p:nvPicPr></p:pic><a:p><a:fld><a:t>2</a:t></a:fld></a:p>"
            ),
            "ppt/slides/slide2.xml": slide(said_in("Opening", "words")),
            "ppt/slides/_rels/slide2.xml.rels": related(
                {"r1": ("notesSlide", "../notesSlides/n.xml")}
            ),
            "ppt/notesSlides/n.xml": slide(said_in("Say hello")),
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
