"""What stands beside a Word document's paragraphs, or in them as no plain text."""

import contextlib
import struct
import tracemalloc

import pytest

from kvlite.documents import archive, read_document
from kvlite.errors import ContextError, DocumentError

from .files import Save, raw_word, refusal, rezipped, run


def paragraph(*inside: str) -> str:
    return f"<w:p>{''.join(inside)}</w:p>"


def text(save: Save, body: str, **parts: str) -> str:
    document = read_document(save("a.docx", raw_word(body, **parts)))
    assert document.not_read == ()
    return document.text


def test_notes_and_comments_stand_where_they_belong(save: Save) -> None:
    body = (
        paragraph(
            run("One"), '<w:r><w:footnoteReference w:id="2"/></w:r>', run(" two"),
            '<w:r><w:footnoteReference w:id="3"/></w:r>', run(" end"),
            '<w:r><w:endnoteReference w:id="1"/></w:r>', run("."),
            '<w:r><w:commentReference w:id="0"/></w:r>',
        )
        + paragraph(run("Again"), '<w:r><w:footnoteReference w:id="2"/></w:r>')
    )  # fmt: skip
    notes = (
        '<w:footnote w:id="-1" w:type="separator"><w:p><w:r><w:separator/></w:r></w:p></w:footnote>'
        f'<w:footnote w:id="2">{paragraph("<w:r><w:footnoteRef/></w:r>", run("First"))}'
        f"{paragraph(run('note'))}</w:footnote>"
        f'<w:footnote w:id="3">{paragraph(run("Second"))}</w:footnote>'
    )
    found = text(
        save,
        body,
        footnotes=notes,
        endnotes=f'<w:endnote w:id="1">{paragraph(run("Source"))}</w:endnote>',
        comments=f'<w:comment w:id="0" w:author="Ann">{paragraph(run("Why?"))}</w:comment>',
    )
    assert found == (
        "One [Note: First note] two [Note: Second] end [Note: Source]. [Comment by Ann: Why?]\n"
        "Again [Note: First note]"
    )


def test_headers_and_footers_are_read_once(save: Save) -> None:
    section = (
        '<w:sectPr><w:headerReference w:type="{}" r:id="{}"/><w:footerReference r:id="{}"/>'
        "</w:sectPr>"
    )
    body = (
        paragraph(f"<w:pPr>{section.format('default', 'header1', 'footer1')}</w:pPr>", run("a"))
        + paragraph(run("b"))
        + section.format("first", "header2", "footer1")
    )
    found = text(
        save,
        body,
        header1=paragraph(run("Secret")) + paragraph(),
        header2=paragraph(run("Secret")) + paragraph(run("Cover")),
        footer1=paragraph(run("Page 1")),
    )
    assert found == "Secret\nCover\na\nb\nPage 1"


def test_text_boxes_are_read_once_after_their_paragraph(save: Save) -> None:
    box = f"<w:txbxContent>{paragraph(run('in a box'))}{paragraph(run('of two'))}</w:txbxContent>"
    drawn = (
        f"<w:r><mc:AlternateContent><mc:Choice><w:drawing>{box}</w:drawing></mc:Choice>"
        f"<mc:Fallback><w:pict>{box}</w:pict></mc:Fallback></mc:AlternateContent></w:r>"
    )
    old = f"<w:r><w:pict><v:textbox>{box}</v:textbox></w:pict></w:r>"
    fallback = (
        f"<w:r><mc:AlternateContent><mc:Fallback>{old}</mc:Fallback></mc:AlternateContent></w:r>"
    )
    for form in (drawn, old, fallback):
        body = paragraph(run("before"), form, run(" after")) + paragraph(run("next"))
        assert text(save, body) == "before after\nin a box\nof two\nnext"
    art = '<w:r><w:pict><v:shape><v:textpath string="DRAFT"/></v:shape></w:pict></w:r>'
    assert text(save, paragraph(run("a"), art)) == "a\nDRAFT"


def test_entities_of_its_own_are_refused(save: Save) -> None:
    """Word writes none, and what follows one must not be lost."""
    begins = '<!DOCTYPE w:document [<!ENTITY firm "Smith and Sons">]>'
    body = paragraph(run("To &firm; of London"))
    assert "is damaged" in refusal(save("a.docx", raw_word(body, begins=begins)))
    assert "is damaged" in refusal(save("a.docx", raw_word(paragraph(run("a &none; b")))))


def test_no_entity_reads_another_file_or_fills_memory(save: Save) -> None:
    secret = save("secret.txt", "secret")
    outer = f'<!DOCTYPE w:document [<!ENTITY x SYSTEM "file://{secret}">]>'
    path = save("a.docx", raw_word(paragraph(run("a &x; b")), begins=outer))
    with contextlib.suppress(DocumentError):
        assert "secret" not in read_document(path).text
    laughs = '<!ENTITY l0 "lol">' + "".join(
        f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 12)
    )
    body, begins = paragraph(run("&l11;")), f"<!DOCTYPE w:document [{laughs}]>"
    assert "damaged" in refusal(save("a.docx", raw_word(body, begins=begins)))


def test_pictures_are_counted_and_their_descriptions_read(save: Save) -> None:
    drawn = (
        '<w:r><w:drawing><wp:docPr name="x"{}/><a:graphic><pic:pic/></a:graphic></w:drawing></w:r>'
    )
    old = '<w:r><w:pict><v:shape alt="Logo"><v:imagedata/></v:shape></w:pict></w:r>'
    embedded = "<w:r><w:object><v:shape><v:imagedata/></v:shape><o:OLEObject/></w:object></w:r>"
    charts = "<w:r><w:drawing><c:chart/></w:drawing><w:drawing><dgm:relIds/></w:drawing></w:r>"
    body = paragraph(
        run("a "), drawn.format(' descr="A cat"'), drawn.format(""), old, embedded, charts
    )
    document = read_document(save("a.docx", raw_word(body)))
    assert document.text == "a [Picture: A cat][Picture: Logo]"
    assert document.not_read == ("3 pictures", "1 chart", "1 diagram", "1 embedded object")


def test_notes_headers_and_symbols_that_are_missing_are_counted(save: Save) -> None:
    body = paragraph(
        run("a"), '<w:r><w:footnoteReference w:id="9"/></w:r>',
        '<w:r><w:sym w:font="Wingdings" w:char="F0E0"/><w:sym w:font="X" w:char="2192"/></w:r>',
    ) + '<w:sectPr><w:headerReference r:id="gone"/></w:sectPr>'  # fmt: skip
    document = read_document(save("a.docx", raw_word(body)))
    assert document.text == "a→"
    assert {*document.not_read} == {"1 footnote", "1 symbol", "1 header"}


def test_raised_lowered_and_struck_text_is_marked_and_hidden_text_is_not_read(save: Save) -> None:
    def styled(style: str, inside: str) -> str:
        return f"<w:r><w:rPr>{style}</w:rPr><w:t>{inside}</w:t></w:r>"

    raised, lowered = (f'<w:vertAlign w:val="{each}script"/>' for each in ("super", "sub"))
    body = paragraph(
        run("10"), styled(raised, "6"), run(" H"), styled(lowered, "2"), run("O, "),
        styled("<w:strike/>", "50"), run(" 40"), styled("<w:vanish/>", "no"),
        styled('<w:vanish w:val="0"/>', "!"),
    )  # fmt: skip
    ends = f"<w:pPr><w:rPr><w:vanish/>{raised}</w:rPr></w:pPr>"
    body += paragraph(run("  if x:"))
    body += paragraph(ends, run("of\xadfice \ufb03"))
    assert text(save, body) == "10^6 H_2O, ~~50~~ 40!\n  if x:\noffice ffi"


def test_what_was_filled_in_is_read_and_placeholders_are_not(save: Save) -> None:
    def field(data: str) -> str:
        begin, end = (f'<w:r><w:fldChar w:fldCharType="{each}"' for each in ("begin", "end"))
        instruction = "<w:r><w:instrText> FORM </w:instrText></w:r>"
        return f"{begin}><w:ffData>{data}</w:ffData></w:fldChar></w:r>{instruction}{end}/></w:r>"

    entries = "".join(f'<w:listEntry w:val="{each}"/>' for each in ("Red", "Blue"))
    chosen = field(f'<w:ddList><w:result w:val="1"/>{entries}</w:ddList>')
    first = field(f"<w:ddList>{entries}</w:ddList>")
    checked = field("<w:checkBox><w:default w:val='0'/><w:checked/></w:checkBox>")
    unchecked = field("<w:checkBox><w:default w:val='1'/><w:checked w:val='0'/></w:checkBox>")
    placeholder = (
        f"<w:sdt><w:sdtPr><w:showingPlcHdr/></w:sdtPr><w:sdtContent>{run('Click here')}"
        "</w:sdtContent></w:sdt>"
    )
    body = (
        paragraph(chosen, run(" or "), first, run("."))
        + paragraph(checked, run(" agreed "), unchecked, run(" paid"))
        + paragraph(run("Name: "), placeholder, f"<w:customXml>{run('own')}</w:customXml>")
    )
    assert text(save, body) == "Blue or Red.\n[x] agreed [ ] paid\nName: own"


def test_what_stands_in_no_place_is_read(save: Save) -> None:
    """Cells of a damaged table, which stand in no row; a comment that nothing refers to."""
    table = f"<w:tbl>{cell('one')}{cell('two')}</w:tbl>"
    assert text(save, paragraph(run("before")) + table) == "before\none | two"
    said = f'<w:comment w:id="9">{paragraph(run("nowhere"))}</w:comment>'
    assert "nowhere" in text(save, paragraph(run("a")), comments=said)


def test_breaks_hyphens_fields_and_changes(save: Save) -> None:
    body = paragraph(
        '<w:pPr><w:tabs><w:tab w:val="left"/></w:tabs></w:pPr>',
        "<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:noBreakHyphen/><w:t>c</w:t><w:softHyphen/>"
        '<w:br/><w:t>d</w:t><w:br w:type="page"/><w:t>e</w:t></w:r>',
        f"<w:hyperlink>{run('f')}</w:hyperlink><w:del>{run('no')}</w:del>",
        '<w:r><w:fldChar w:fldCharType="begin"/><w:instrText>PAGE</w:instrText></w:r>' + run("7"),
    )
    assert text(save, body) == "a\tb-c\nd\nef7"


def cell(inside: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{paragraph(run(inside))}</w:tc>"


def test_a_cell_merged_with_those_below_stands_in_each_row(save: Save) -> None:
    below = "<w:vMerge/>"
    rows = (
        cell("wide", '<w:gridSpan w:val="2"/>') + cell("x"),
        cell("1") + cell("tall", '<w:vMerge w:val="restart"/>') + cell("y"),
        cell("2") + cell("", below) + cell("z"),
    )
    table = f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in rows)}</w:tbl>"
    assert text(save, table) == "wide | wide | x\n1 | tall | y\n2 | tall | z"


NUMBERING = (
    '<w:abstractNum w:abstractNumId="0">'
    '<w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:pStyle w:val="H1"/>'
    '<w:lvlText w:val="%1."/></w:lvl>'
    '<w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/>'
    '<w:lvlText w:val="%1(%2)"/></w:lvl></w:abstractNum>'
    '<w:abstractNum w:abstractNumId="1"><w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/>'
    '<w:lvlText w:val="&#xF0B7;"/></w:lvl></w:abstractNum>'
    '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    '<w:num w:numId="2"><w:abstractNumId w:val="1"/></w:num>'
    '<w:num w:numId="3"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0">'
    '<w:startOverride w:val="7"/></w:lvlOverride></w:num>'
)
STYLES = (
    '<w:style w:type="paragraph" w:styleId="H1"><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr>'
    '</w:pPr></w:style><w:style w:type="paragraph" w:styleId="H1b"><w:basedOn w:val="H1"/>'
    "</w:style>"
)


def item(inside: str, number: int, level: int = 0) -> str:
    listed = f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>'
    return paragraph(f"<w:pPr>{listed}</w:pPr>", run(inside))


def test_list_numbers_and_bullets_are_read(save: Save) -> None:
    """They stand nowhere in the text, and contracts refer to them."""
    styled = '<w:pPr><w:pStyle w:val="{}"/></w:pPr>'
    body = (
        paragraph(styled.format("H1"), run("Rent"))
        + item("monthly", 1, 1)
        + item("in advance", 1, 1)
        + paragraph(styled.format("H1b"), run("Term"))
        + item("one year", 1, 1)
        + item("apples", 2)
        + item("seven", 3)
        + item("eight", 3)
        + item("plain", 0)
    )
    assert text(save, body, numbering=NUMBERING, styles=STYLES) == (
        "1. Rent\n  1(a) monthly\n  1(b) in advance\n2. Term\n  2(a) one year\n- apples\n7. seven\n"
        "8. eight\nplain"
    )
    document = read_document(save("a.docx", raw_word(item("a", 5), numbering=NUMBERING)))
    assert (document.text, document.not_read) == ("a", ("1 list number",))


def everything() -> bytes:
    """A document of all that can be read, and some that cannot."""
    drawn = '<w:r><w:drawing><wp:docPr descr="A cat"/><pic:pic/></w:drawing></w:r>'
    box = f"<w:r><w:pict><w:txbxContent>{paragraph(run('box'))}</w:txbxContent></w:pict></w:r>"
    wide, below = '<w:gridSpan w:val="2"/>', "<w:vMerge/>"
    row = f"<w:tr>{cell('a', wide)}{cell('b', below)}</w:tr>"
    refers = '<w:r><w:footnoteReference w:id="2"/><w:commentReference w:id="0"/></w:r>'
    section = '<w:sectPr><w:headerReference r:id="header1"/></w:sectPr>'
    equation = "<m:oMath><m:f><m:num><m:r><m:t>x</m:t></m:r></m:num></m:f></m:oMath>"
    symbol = '<w:r><w:sym w:char="F0E0"/><w:br/></w:r>'
    return raw_word(
        paragraph(run("one"), refers, drawn, box, equation, symbol)
        + f"<w:tbl>{row}{row}</w:tbl>{item('x', 1, 1)}{section}",
        begins='<!DOCTYPE w:document [<!ENTITY e "entity">]>',
        footnotes=f'<w:footnote w:id="2">{paragraph(run("note"))}</w:footnote>',
        comments=f'<w:comment w:id="0" w:author="A">{paragraph(run("why"))}</w:comment>',
        header1=paragraph(run("head")),
        numbering=NUMBERING,
        styles=STYLES,
    )


# What unpacks to too much


def test_an_archive_that_unpacks_to_too_much_is_refused(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "UNPACKED_LIMIT", 10**6)
    bomb = raw_word("<w:p/>" * 300_000)
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        assert "unpacks to more than 976.6 KiB" in refusal(save("a.docx", bomb))
        assert tracemalloc.get_traced_memory()[1] < 16 * 10**6
    finally:
        tracemalloc.stop()


def test_empty_paragraphs_are_one_empty_line(save: Save) -> None:
    content = raw_word(paragraph(run("a")) + "<w:p/>" * 100 + paragraph(run("b")))
    assert read_document(save("a.docx", content), limit=4).text == "a\n\nb"
    with pytest.raises(ContextError, match="has 4 characters"):
        read_document(save("a.docx", content), limit=3)


def test_what_an_archive_says_of_its_parts_is_not_believed(save: Save) -> None:
    """A part that says it is small is unpacked no further."""
    bomb = bytearray(raw_word("<w:p/>" * 500_000))
    name = b"word/document.xml"
    struct.pack_into("<I", bomb, bomb.index(name) - 30 + 22, 1000)
    struct.pack_into("<I", bomb, bomb.rindex(name) - 46 + 24, 1000)
    tracemalloc.start()
    try:
        refusal(save("a.docx", bytes(bomb)))
        assert tracemalloc.get_traced_memory()[1] < 16 * 10**6
    finally:
        tracemalloc.stop()


def test_an_archive_of_very_many_parts_is_refused(save: Save) -> None:
    content = rezipped(raw_word(paragraph(run("x"))), "", bytes)
    assert "has more than 20,000 parts" in refusal(save("a.docx", content + b"PK\1\2" * 30_000))


def test_markup_deeper_than_any_document_is_refused(save: Save) -> None:
    def nested(deep: int) -> str:
        return "<w:sdt>" * deep + paragraph(run("x")) + "</w:sdt>" * deep

    assert text(save, nested(2000)) == "x"
    assert "is damaged" in refusal(save("a.docx", raw_word(nested(50_000))))


def styled(text: str, properties: str) -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t>{text}</w:t></w:r>"


def test_text_is_raised_struck_and_hidden_by_its_styles_and_shown_again_by_itself(
    save: Save,
) -> None:
    raised = '<w:vertAlign w:val="superscript"/>'
    styles = "".join(
        f'<w:style w:styleId="{name}"><w:basedOn w:val="{base}"/><w:rPr>{own}</w:rPr></w:style>'
        for name, base, own in (
            ("Mark", "", raised), ("Inner", "Mark", "<w:b/>"), ("Off", "Off", "<w:vanish/>"),
            ("Old", "", "<w:strike/>"),
        )
    )  # fmt: skip
    body = paragraph(
        run("a"), styled("1", '<w:rStyle w:val="Inner"/>'), run(" "),
        styled("b", '<w:rStyle w:val="Mark"/><w:vertAlign w:val="baseline"/>'),
        styled("no", '<w:rStyle w:val="Off"/>'),
        styled("c", '<w:rStyle w:val="Off"/><w:vanish w:val="0"/>'),
        run(" 10"), styled("6", '<w:position w:val="8"/>'), run(" x"),
        styled("i", '<w:position w:val="-6"/>'), styled("y", '<w:position w:val="1"/>'),
    )  # fmt: skip
    body += paragraph('<w:pPr><w:pStyle w:val="Off"/></w:pPr>', run("no"))
    body += paragraph('<w:pPr><w:pStyle w:val="Old"/></w:pPr>', run("old"))
    assert text(save, body, styles=styles) == "a^1 bc 10^6 x_iy\n\n~~old~~"


def listed(text: str, number: int, level: int = 0, mark: str = "") -> str:
    where = f'<w:ilvl w:val="{level}"/><w:numId w:val="{number}"/>'
    return paragraph(f"<w:pPr><w:numPr>{where}</w:numPr>{mark}</w:pPr>", text)


def numbering(second: str = "", change: str = "") -> str:
    """Two lists of the same levels, the second of which may change them, and one by a style."""
    levels = "".join(
        f'<w:lvl w:ilvl="{at}"><w:numFmt w:val="{form}"/><w:lvlText w:val="{shown}"/>{more}</w:lvl>'
        for at, (form, shown, more) in enumerate(
            (("upperRoman", "%1.", ""), ("decimal", "%1.%2", second))
        )
    )
    return (
        f'<w:abstractNum w:abstractNumId="0">{levels}</w:abstractNum>'
        '<w:abstractNum w:abstractNumId="1"><w:numStyleLink w:val="L"/></w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
        f'<w:num w:numId="2"><w:abstractNumId w:val="0"/>{change}</w:num>'
        '<w:num w:numId="3"><w:abstractNumId w:val="1"/></w:num>'
    )


def test_numbers_of_lists_that_change_others_or_are_those_of_a_style(save: Save) -> None:
    change = (
        '<w:lvlOverride w:ilvl="0"><w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/>'
        '<w:lvlText w:val="o"/></w:lvl></w:lvlOverride>'
    )
    body = listed(run("a"), 1) + listed(run("b"), 2)
    assert text(save, body, numbering=numbering(change=change)) == "I. a\n- b"
    style = (
        '<w:style w:styleId="L"><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
    )
    assert text(save, listed(run("a"), 3), styles=style, numbering=numbering()) == "I. a"
    body = "".join(listed(run("a"), 1, level) for level in (0, 1, 0, 1))
    for second, shown in (
        ("<w:isLgl/>", "I. a\n  1.1 a\nII. a\n  2.1 a"),
        ('<w:lvlRestart w:val="0"/>', "I. a\n  I.1 a\nII. a\n  II.2 a"),
    ):
        assert text(save, body, numbering=numbering(second)) == shown


def test_deleted_ends_of_paragraphs_rows_and_cells(save: Save) -> None:
    gone = '<w:rPr><w:del w:id="1"/></w:rPr>'
    deleted = '<w:del w:id="2"><w:r><w:delText>no</w:delText></w:r></w:del>'
    body = listed(run("a"), 1) + listed(deleted, 1, mark=gone) + listed(run("b"), 1)
    body += paragraph(f"<w:pPr>{gone}</w:pPr>", run("Hel")) + paragraph(run("lo"))
    cell = "<w:tc>{}" + paragraph(run("x")) + "</w:tc>"
    off = cell.format('<w:tcPr><w:cellDel w:id="3"/></w:tcPr>')
    body += f"<w:tbl><w:tr>{cell.format('') * 2}{off}</w:tr>"
    body += f'<w:tr><w:trPr><w:del w:id="4"/></w:trPr>{cell.format("") * 2}</w:tr></w:tbl>'
    assert text(save, body, numbering=numbering()) == "I. a\nII. b\nHello\nx | x"


def test_characters_of_the_font_symbol_and_old_formulas(save: Save) -> None:
    font = '<w:rFonts w:ascii="{}" w:hAnsi="{}"/>'
    body = paragraph(
        run("5 "), styled("\uf06d", font.format("Symbol", "Symbol")), run("m, 20 "),
        '<w:r><w:sym w:font="Symbol" w:char="F0B0"/></w:r>', run("C, "),
        '<w:r><w:instrText xml:space="preserve"> EQ \\f(1,2) </w:instrText></w:r>',
    )  # fmt: skip
    assert text(save, body) == "5 \u03bcm, 20 \u00b0C, \\f(1,2)"
    body = paragraph(run("a"), styled("\uf0fe", font.format("Wingdings", "Wingdings")))
    document = read_document(save("a.docx", raw_word(body)))
    assert (document.text, document.not_read) == ("a", ("1 symbol",))
