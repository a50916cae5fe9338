"""Rich text: what is read of it."""

from kvlite.documents import read_document

from .files import Save
from .formats import RICH_TEXT


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
