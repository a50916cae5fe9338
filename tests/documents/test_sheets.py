"""Workbooks: what is read of each cell, and what ends the reading."""

from collections.abc import Mapping

import pytest

from kvlite.documents import read_document
from kvlite.documents.number_format import formatted, simplified
from kvlite.errors import ContextError

from .files import Save, refusal
from .formats import OFFICE, opendocument, packed, parts_of, related

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_ODS = "application/vnd.oasis.opendocument.spreadsheet"
_SHEET = "xl/worksheets/sheet1.xml"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"


def _related(targets: Mapping[str, tuple[str, str]]) -> str:
    return related(targets).replace("<Relationships>", f'<Relationships xmlns="{_PACKAGE}">')


def workbook(
    rows: str = '<row r="1"><c r="A1" t="inlineStr"><is><t>North</t></is></c><c r="C1"><v>12</v>'
    '</c><c r="D1"><v>0.5</v></c></row><row r="3"><c r="A3" s="1"><v>45717</v></c></row>',
    *,
    after: str = "",
    beside: Mapping[str, tuple[str, str]] | None = None,
    settings: str = "",
    **parts: str,
) -> bytes:
    """A workbook of one sheet, of its rows, what stands after them and other parts."""
    names = {f"r{part}": (part, f"{part}.xml") for part in ("styles", *parts)}
    styles = (
        '<fonts><font/><font><strike/></font></fonts><cellXfs><xf numFmtId="0"/>'
        '<xf numFmtId="14"/><xf numFmtId="0" fontId="1"/></cellXfs>'
    )
    content = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/'
        'content-types"/>',
        "_rels/.rels": _related({"r": ("officeDocument", "xl/workbook.xml")}),
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{OFFICE}">{settings}<sheets>'
        '<sheet name="Sales" sheetId="1" r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": _related(
            {"r1": ("worksheet", "worksheets/sheet1.xml"), **names}
        ),
        _SHEET: f'<worksheet xmlns="{_MAIN}"><sheetData>{rows}</sheetData>{after}</worksheet>',
        "xl/worksheets/_rels/sheet1.xml.rels": _related(beside or {}),
    }
    for name, markup in {"styles": styles, **parts}.items():
        content[f"xl/{name}.xml"] = f'<x xmlns="{_MAIN}">{markup}</x>'
    return packed(content)


def _texts(*texts: str) -> str:
    """A row of texts, each after its column."""
    return "".join(
        f'<c r="{column}" t="inlineStr"><is><t>{text}</t></is></c>'
        for column, _, text in (each.partition(":") for each in texts)
    )


def spreadsheet(rows: str, styles: str = "", **names: str) -> bytes:
    """An OpenDocument file of one sheet."""
    parts = parts_of(
        opendocument(
            f'<office:spreadsheet><table:table table:name="Costs">{rows}</table:table>'
            "</office:spreadsheet>",
            styles,
        )
    )
    return packed({**parts, "mimetype": _ODS, **names})


def _cell(inside: str, attributes: str = "") -> str:
    return f"<table:table-cell {attributes}>{inside}</table:table-cell>"


def test_workbook(save: Save) -> None:
    read = read_document(save("a.xlsx", workbook()))
    assert read.text == "Sales\nNorth |  | 12 | 0.5\n2025-03-01"


def test_texts_raised_lowered_and_struck(save: Save) -> None:
    """Those that cells share and their own; `rPh` says how they are pronounced."""
    up, down, off = (
        f"<rPr>{each}</rPr>"
        for each in ('<vertAlign val="superscript"/>', '<vertAlign val="subscript"/>', "<strike/>")
    )
    shared = (
        f"<si><r><t>There are 10</t></r><r>{up}<t>6 </t></r><r><t>cells of H</t></r><r>{down}"
        f"<t>2</t></r><r><t>O</t></r></si><si><t>two\nlines_x000D_</t><rPh><t>no</t></rPh></si>"
        f"<si><r><t>1990</t></r><r>{up}<t>3</t></r><r>{up}<t>4</t></r><r><t> </t></r><r>{off}"
        "<t>gone</t></r></si>"
    )
    rows = (
        '<row><c t="s"><v>0</v></c><c t="s"><v>1</v></c><c t="s"><v>2</v></c>'
        '<c s="2"><v>50</v></c></row>'
    )
    read = read_document(save("a.xlsx", workbook(rows, sharedStrings=shared)))
    assert read.text == (
        "Sales\nThere are 10^6 cells of H_2O | two lines | 1990^34 ~~gone~~ | ~~50~~"
    )


def test_values_that_are_no_numbers(save: Save) -> None:
    rows = (
        '<row><c t="b"><v>1</v></c><c t="b"><v>0</v></c><c t="e"><v>#DIV/0!</v></c>'
        '<c t="str"><f>A1</f><v>said</v></c><c t="d"><v>2025-03-01T00:00:00</v></c>'
        '<c t="d"><v>2025-03-01T18:30</v></c><c><f>1.5*2</f><v>3</v></c></row>'
    )
    assert read_document(save("a.xlsx", workbook(rows))).text == (
        "Sales\nTRUE | FALSE | #DIV/0! | said | 2025-03-01 | 2025-03-01 18:30 | 3"
    )


def test_formulas_without_a_value_are_named(save: Save) -> None:
    """A value that is an empty text is one."""
    rows = (
        '<row r="4"><c r="B4"><v>2</v></c><c r="C4"><f>SUM(B2:B4)</f></c><c r="D4"><f>C4</f><v/>'
        '</c><c r="E4" t="str"><f>T(A1)</f><v></v></c></row>'
    )
    read = read_document(save("a.xlsx", workbook(rows)))
    assert read.text == "Sales\n2 | [=SUM(B2:B4): no value] | [=C4: no value]"
    assert read.not_read == ("2 uncalculated formulas (Sales!C4, Sales!D4)",)
    many = "".join(f'<c r="{column}1"><f>1</f></c>' for column in "ABCDE")
    read = read_document(save("b.xlsx", workbook(f"<row>{many}</row>")))
    assert read.not_read == ("5 uncalculated formulas (Sales!A1, Sales!B1, Sales!C1)",)


@pytest.mark.parametrize(
    ("number", "code", "shown"),
    [
        (45365, "yyyy\\-mm\\-dd;@", "2024-03-14"),
        (45365, "dd.mm.yyyy hh:mm", "2024-03-14 00:00"),
        (45365.75, "[$-409]d/m/yy h:mm AM/PM", "2024-03-14 18:00"),
        (45365.7500116, "m/d/yy h:mm", "2024-03-14 18:00:01"),
        (0.75, "h:mm", "18:00"),
        (0.00123, "mm:ss.00", "00:01:46.272"),
        (1.5, "[h]:mm:ss", "36:00:00"),
        (59, "d", "1900-02-28"),
        (61, "d", "1900-03-01"),
        (0.5, "0%", "50%"),
        (0.07, "0.00%", "7%"),
        (0.1234, "0%;[Red]-0%", "12.34%"),
        (-1, "yyyy", "-1"),
        (1e9, "yyyy", "1000000000"),
        (12, "General", "12"),
        (12.5, '#,##0.00 "days"', "12.5 days"),
        (3, "[Red]0;[Yellow]dd", "3"),
        (5, "0\\h_d*s", "5h"),
        (1200, "[$\u20ac-407] #,##0.00", "\u20ac 1200"),
        (-1200, '_-"$"* #,##0.00_-;-"$"* #,##0.00', "-$1200"),
        (5, '0.00" %";[Red]-0.00" %"', "5 %"),
        (21.5, 'General"\u00b0C"', "21.5\u00b0C"),
        (1500000, '0.0,,"M"', "1500000"),
        (501, "00000", "00501"),
        (0.1 + 0.2, "General", "0.3"),
        (0.1 + 0.2, "", "0.3"),
    ],
)
def test_numbers_by_the_codes_of_their_formats(number: float, code: str, shown: str) -> None:
    assert formatted(float(number), simplified(code)) == shown


def test_formats_of_a_workbook(save: Save) -> None:
    """By number and by code, with days counted from 1904."""
    styles = (
        '<numFmts><numFmt numFmtId="164" formatCode="[hh]:mm"/></numFmts><cellXfs>'
        '<xf numFmtId="22"/><xf numFmtId="10"/><xf numFmtId="164"/><xf numFmtId="46"/></cellXfs>'
    )
    rows = (
        '<row><c s="0"><v>1.5</v></c><c s="1"><v>0.125</v></c><c s="2"><v>2</v></c>'
        '<c s="3"><v>1.25</v></c></row>'
    )
    content = workbook(rows, styles=styles, settings='<workbookPr date1904="1"/>')
    assert read_document(save("a.xlsx", content)).text == (
        "Sales\n1904-01-02 12:00 | 12.5% | 48:00:00 | 30:00:00"
    )


def test_merged_cells_are_repeated(save: Save) -> None:
    """But not over a heading's row, nor over rows that have nothing else, nor long ones."""
    rows = (
        f'<row r="1">{_texts("A1:Rivers")}</row>'
        f'<row r="2">{_texts("A2:River", "B2:Years")}</row>'
        f'<row r="3">{_texts("B3:2001", "C3:2002")}</row>'
        f'<row r="4">{_texts("A4:Ouse", "B4:7", "C4:8")}</row>'
        f'<row r="6">{_texts("B6:9")}</row>'
        f'<row r="7">{_texts("A7:" + "x" * 120, "C7:1")}</row>'
    )
    areas = ("A1:C1", "A2:A3", "B2:C2", "A4:A1048576", "A7:B7")
    after = "".join(f'<mergeCell ref="{area}"/>' for area in areas)
    read = read_document(save("a.xlsx", workbook(rows, after=f"<mergeCells>{after}</mergeCells>")))
    assert read.text.split("\n") == [
        *("Sales", "Rivers", "River | Years | Years", "River | 2001 | 2002"),
        *("Ouse | 7 | 8", "Ouse | 9", "x" * 120 + " |  | 1"),
    ]


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        (("B1:a", "D1:b"), "a |  | b"),
        (("A1:a", "BN1:b"), "a" + " | " * 65 + "b"),
        (("A1:a", "BO1:b"), "a | b"),
        (("A1:a", "B1:", "C1: "), "a"),
    ],
)
def test_empty_cells_between_two(save: Save, cells: tuple[str, ...], line: str) -> None:
    read = read_document(save("a.xlsx", workbook(f"<row>{_texts(*cells)}</row>")))
    assert read.text == f"Sales\n{line}"


def test_cells_far_apart(save: Save) -> None:
    rows = f'<row r="1">{_texts("A1:near")}</row><row r="1048576">{_texts("XFD1048576:far")}</row>'
    assert read_document(save("a.xlsx", workbook(rows))).text == "Sales\nnear\nfar"
    empty = '<table:table-cell table:number-columns-repeated="16383"/>'
    near, far = (_cell(f"<text:p>{each}</text:p>") for each in ("near", "far"))
    rows = (
        f"<table:table-row>{near}</table:table-row><table:table-row "
        f'table:number-rows-repeated="1048574">{empty}</table:table-row>'
        f"<table:table-row>{empty}{far}</table:table-row>"
    )
    assert read_document(save("a.ods", spreadsheet(rows))).text == "Costs\nnear\nfar"


def test_notes_and_shapes(save: Save) -> None:
    """A comment's thread replaces what older programs are told of it."""
    comments = (
        f'<comments xmlns="{_MAIN}"><authors><author>Ann</author><author>tc=1</author></authors>'
        '<commentList><comment ref="A1" authorId="0"><text><r><t>Ann:</t></r><r><t>\nCheck 10</t>'
        '</r><r><rPr><vertAlign val="superscript"/></rPr><t>6</t></r></text></comment>'
        '<comment ref="C3" authorId="1"><text><t>[Threaded comment]</t></text></comment>'
        "</commentList></comments>"
    )
    thread = (
        '<ThreadedComments xmlns="t"><threadedComment ref="C3" personId="p"><text>Really?</text>'
        '</threadedComment><threadedComment ref="C3" personId="q"><text>Yes.</text>'
        "</threadedComment></ThreadedComments>"
    )
    drawing = (
        f'<d xmlns:a="a"><mc:AlternateContent xmlns:mc="m"><mc:Choice>{_BOX}</mc:Choice>'
        f"<mc:Fallback>{_BOX}</mc:Fallback></mc:AlternateContent></d>"
    )
    content = workbook(
        f"<row>{_texts('A1:North')}</row>",
        beside={
            "c": ("comments", "../c.xml"),
            "t": ("threadedComment", "../t.xml"),
            "d": ("drawing", "../d.xml"),
            "v": ("vmlDrawing", "../none.vml"),
        },
        person='<person id="p" displayName="Bo"/>',
    )
    related = _related({"1": ("chart", "c1.xml"), "2": ("image", "i.png")})
    parts = {"c.xml": comments, "t.xml": thread, "d.xml": drawing, "_rels/d.xml.rels": related}
    content = packed({**parts_of(content), **{f"xl/{name}": each for name, each in parts.items()}})
    read = read_document(save("a.xlsx", content))
    assert read.text == (
        "Sales\nNorth [Note by Ann: Check 10^6]\n |  | [Note by Bo: Really?] [Note: Yes.]\n"
        "Look here"
    )
    assert read.not_read == ("1 chart", "1 picture")


_BOX = "<txBody><a:p><a:r><a:t>Look </a:t></a:r><a:r><a:t>here</a:t></a:r></a:p><a:p/></txBody>"


def test_hidden_sheets_are_read_and_sheets_of_charts_counted(save: Save) -> None:
    parts = parts_of(workbook())
    more = b'<sheet name="H" state="hidden" r:id="r1"/><sheet name="Chart" r:id="r2"/></sheets>'
    parts["xl/workbook.xml"] = parts["xl/workbook.xml"].replace(b"</sheets>", more)
    parts["xl/_rels/workbook.xml.rels"] = _related(
        {"r1": ("worksheet", "worksheets/sheet1.xml"), "r2": ("chartsheet", "c.xml")}
    ).encode()
    parts[_SHEET] = f'<worksheet xmlns="{_MAIN}"/>'.encode()
    read = read_document(save("a.xlsx", packed(parts)))
    assert (read.text, read.not_read) == ("Sales\n\nH", ("1 chart",))


def test_the_other_standard(save: Save) -> None:
    parts = parts_of(workbook())
    strict = {
        name: each.replace(_MAIN.encode(), b"http://purl.oclc.org/ooxml/spreadsheetml/main")
        .replace(OFFICE.encode(), b"http://purl.oclc.org/ooxml/officeDocument/relationships")
        for name, each in parts.items()
    }  # fmt: skip
    read = read_document(save("a.xlsx", packed(strict)))
    assert read.text == "Sales\nNorth |  | 12 | 0.5\n2025-03-01"


def test_spreadsheet(save: Save) -> None:
    """Whatever it is called: its type tells it from a text."""
    shown = "<text:p>{}</text:p>".format
    styles = (
        '<style:style style:name="up"><style:text-properties style:text-position="super 58%"/>'
        '</style:style><style:style style:name="off"><style:text-properties '
        'style:text-line-through-style="solid"/></style:style>'
    )
    note = '<office:annotation xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:creator>Ann</dc:creator><text:p>Check</text:p>'
    first = (
        _cell(f"{note}</office:annotation>" + shown("Ann"))
        + _cell(shown("0 %"), 'table:number-columns-repeated="3"')
        + _cell("", 'table:number-columns-repeated="2"')
        + _cell(
            shown('10<text:span text:style-name="up">6</text:span><text:s/>of')
            + shown(f"all{note}</office:annotation>")
        )
    )
    second = (
        _cell(shown("both"), 'table:number-columns-spanned="2" table:number-rows-spanned="2"')
        + "<table:covered-table-cell><text:p>covered</text:p></table:covered-table-cell>"
        + _cell(shown("gone"), 'table:style-name="off"')
    )
    third = '<table:covered-table-cell table:number-columns-repeated="2"/>' + (
        _cell("", 'office:value-type="float" office:value="7"')
        + _cell("", 'table:formula="of:=A1"')
    )
    rows = "".join(
        f"<table:table-row>{each}<table:table-cell table:number-columns-repeated='9999'/>"
        "</table:table-row>"
        for each in (first, second, third)
    )
    shape = "<draw:frame><draw:text-box><text:p>Look here</text:p></draw:text-box></draw:frame>"
    rows = (
        f"<table:shapes>{shape}<draw:frame><draw:image/></draw:frame></table:shapes>"
        f"<table:table-row-group>{rows}</table:table-row-group>"
    )
    read = read_document(save("a.bin", spreadsheet(rows, styles)))
    assert read.text.split("\n") == [
        "Costs",
        "Ann [Note by Ann: Check] | 0 % | 0 % | 0 % |  |  | 10^6 of all [Comment by Ann: Check]",
        "both | both | ~~gone~~",
        "both | both | 7 | [=A1: no value]",
        "Look here",
    ]
    assert read.not_read == ("1 picture", "1 uncalculated formula (Costs!R3C4)")


def test_values_of_a_spreadsheet_that_others_show(save: Save) -> None:
    style = (
        '<style:style style:name="Old" style:family="table-cell"><style:text-properties '
        'style:text-line-through-style="solid"/></style:style><style:style style:name="ce1" '
        'style:family="table-cell" style:parent-style-name="Old"/>'
    )
    cells = _cell("", 'office:value-type="percentage" office:value="0.07"')
    cells += _cell("", 'office:value-type="currency" office:value="3" office:currency="EUR"')
    cells += _cell("", 'office:value-type="boolean" office:boolean-value="true"')
    cells += _cell("<text:p>x</text:p>", 'table:style-name="ce1"')
    content = spreadsheet(f"<table:table-row>{cells}</table:table-row>", style)
    assert read_document(save("a.ods", content)).text == "Costs\n7% | 3 EUR | TRUE | ~~x~~"


@pytest.mark.parametrize("count", ["1048576", "9999999999"])
def test_repeated_rows_are_limited(save: Save, count: str) -> None:
    cell = _cell("<text:p>full</text:p>", 'table:number-columns-repeated="16384"')
    rows = f'<table:table-row table:number-rows-repeated="{count}">{cell}</table:table-row>'
    assert "unpacks to more than" in refusal(save("a.ods", spreadsheet(rows)))


@pytest.mark.parametrize("name", ["a.xlsx", "a.xls", "a.ods", "a.xlsb"])
def test_what_is_none_is_refused(save: Save, name: str) -> None:
    assert "is damaged or no workbook" in refusal(save(name, "words"))
    assert "is damaged or no workbook" in refusal(save(name, b"\xd0\xcf\x11\xe0" + b"x" * 99))


@pytest.mark.parametrize(
    "sheet",
    [
        '<!DOCTYPE x [<!ENTITY e "secret">]><x xmlns="m"><row><c t="str"><v>&e;</v></c></row></x>',
        '<!DOCTYPE x SYSTEM "file:///etc/passwd"><x xmlns="m"><row><c><v>1</v></c></row></x>',
        '<x xmlns="m"><row><c><v>1</v></c></row>',
        '<x xmlns="m"><row><c><v>&e;</v></c></row></x>',
        '<x xmlns="m"><row><c><v>one</v></c></row></x>',
        '<x xmlns="m"><row><c t="s"><v>1</v></c></row></x>',
        '<x xmlns="m"><row><c s="99"><v>1</v></c></row></x>',
        '<x xmlns="m"><row r="1"/><mergeCell ref="A:B"/></x>',
    ],
)
def test_a_damaged_sheet_is_refused(save: Save, sheet: str) -> None:
    content = packed({**parts_of(workbook()), _SHEET: sheet})
    assert "is damaged or no workbook" in refusal(save("a.xlsx", content))


def test_a_workbook_without_a_part_is_refused(save: Save) -> None:
    for missing in (_SHEET, "xl/workbook.xml", "xl/styles.xml"):
        parts = parts_of(workbook())
        del parts[missing]
        assert "is damaged or no workbook" in refusal(save("a.xlsx", packed(parts)))


def test_a_workbook_without_styles(save: Save) -> None:
    parts = parts_of(workbook('<row><c s="3"><v>45717</v></c></row>'))
    parts["xl/styles.xml"] = f'<x xmlns="{_MAIN}"/>'.encode()
    assert read_document(save("a.xlsx", packed(parts))).text == "Sales\n45717"


def test_a_long_workbook_is_refused_by_its_length(save: Save) -> None:
    with pytest.raises(ContextError, match="characters or more"):
        read_document(save("a.xlsx", workbook()), limit=8)
    length = len("Sales\nNorth |  | 12 | 0.5\n2025-03-01")
    assert len(read_document(save("a.xlsx", workbook()), limit=length).text) == length
