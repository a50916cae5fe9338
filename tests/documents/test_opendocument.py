"""OpenDocument texts and slides."""

from kvlite.documents import read_document

from .files import Save
from .formats import SPACES, opendocument, packed, parts_of, text


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
        f"<office:document-styles {SPACES}><office:master-styles><style:header-style/>"
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
