"""The visible text of web pages."""

import time

import pytest

from kvlite.documents import read_document
from kvlite.errors import DocumentError

from .files import Save, read_or_refuse, refusal


def html(save: Save, markup: str | bytes) -> str:
    return read_document(save("a.html", markup)).text


def test_html_gives_its_visible_text(save: Save) -> None:
    text = html(
        save,
        "<!DOCTYPE html><html><head><title>T &amp; x</title><style>p{}</style></head><body>"
        "<script>var a = '<p>no</p>';</script><template>no</template><noscript>no</noscript>"
        "<h1>Head</h1>\n\n<p>One  <b> two</b>,\nthree<!-- no -->.</p>\n<p></p><p>Four</p>"
        "<p hidden>no</p>"
        "<div>a<div>b</div></div>c<br>d<br><br>e</body></html>",
    )
    assert text == "T & x\n\nHead\n\nOne two, three.\n\nFour\n\na\nb\nc\nd\n\ne"


def test_html_lists(save: Save) -> None:
    markup = "<p>x<ul><li><p>a</p></li>\n<li>b<ul><li>c</li></ul></li></ul><ol><li>d<li>e</ol>f"
    assert html(save, markup) == "x\n- a\n- b\n  - c\n1. d\n2. e\n\nf"


def test_html_tables_keep_their_cells_apart(save: Save) -> None:
    text = html(
        save,
        "<table><thead><tr><th></th><th>Price</th></tr></thead>\n<tr>\n<td><p>Pear</p></td>\n"
        "<td><p>3</p></td>\n</tr><tr><td>Fig<td>4</table>",
    )
    assert text == "| Price\nPear | 3\nFig | 4"
    assert html(save, "<p>a</p><table><tr></tr></table><p>b</p>") == "a\n\nb"


def test_html_a_row_may_end_in_empty_cells(save: Save) -> None:
    rows = "".join(f"<tr>{'<td>'.join(['', *row])}</tr>" for row in ("a ", "b&", "cd"))
    rows = rows.replace("&", "&nbsp;")
    rows += "<tr><td></td><td></td></tr><tr><td>e</td><td><img src=x alt=''></td></tr>"
    markup = f"<table>{rows}</table><p>After.</p><table><tr><td>x</td><td></td></tr></table>"
    markup += "<p>Then.</p><ul><li></li></ul><p>Last.</p>"
    assert html(save, markup) == ("a |\nb |\nc | d\ne |\n\nAfter.\nx |\n\nThen.\n\nLast.")


def test_html_cells_over_several_rows_or_columns_stand_in_each(save: Save) -> None:
    rows = "<tr><td rowspan=2>Ouse<td>2001<td>14<tr><td>2002<td>19<tr><td>Cam<td colspan=2>closed"
    assert html(save, f"<table>{rows}</table>") == (
        "Ouse | 2001 | 14\nOuse | 2002 | 19\nCam | closed | closed"
    )
    wide = "<table><tr><td colspan=9999 rowspan=9999>" + "long " * 100 + "</table>"
    assert len(html(save, wide)) < 10_000


def test_html_a_cell_is_in_one_line(save: Save) -> None:
    row = "<tr><td>a<br>b<td><p>p1<p>p2<td><ul><li>i1<li>i2</ul><tr><td>c<td>d<td>e"
    assert html(save, f"<table>{row}</table>") == "a b | p1 p2 | - i1 - i2\nc | d | e"


def test_html_raised_text_keeps_its_numbers_apart(save: Save) -> None:
    markup = (
        "10<sup>6</sup> units, H<sub>2</sub>O, a<sub>1</sub>2, x<sup>n+1</sup>, "
        "in 1990<sup><a href='#f'>3</a></sup>, so<a epub:type=noteref>4</a> "
        "it<a role=doc-noteref><sup>5</sup></a>."
    )
    assert html(save, markup) == "10^6 units, H_2O, a_(1)2, x^(n+1), in 1990[3], so[4] it[5]."


def test_html_formulas_are_tex(save: Save) -> None:
    markup = (
        "<p>Ratio <math><mfrac><mn>1</mn><mn>2</mn></mfrac></math>, power <math><msup><mn>10</mn>"
        "<mn>6</mn></msup></math>, root <math><msqrt><mn>16</mn></msqrt></math>."
    )
    assert html(save, markup) == "Ratio 1/2, power 10^6, root \\sqrt{16}."
    unclosed = "<p>a <math><mrow>" + "<mrow>" * 70 + "<sup>x</sup></math> after"
    assert "after" in html(save, unclosed)


def test_html_struck_text_is_marked(save: Save) -> None:
    markup = "<p>Price: <s>50</s> 40. <del>Closed</del><ins>Open</ins>"
    assert html(save, markup) == "Price: ~~50~~ 40. ~~Closed~~Open"


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        (
            "<p>10<span style='vertical-align:super'>6</span> <a style='vertical-align:sub'>i</a>",
            "10^6 _i",
        ),
        ("<style>.c5{vertical-align:super}</style><p>10<span class=c5>6</span>", "10^6"),
        ("<style>i{text-decoration-line:line-through}</style><p>a <i>b</i>", "a ~~b~~"),
        (
            "<p>x<sup>1</sup><sup>2</sup> <sup><a href=#a>1</a></sup><sup><a href=#b>2</a></sup>",
            "x^12 [1][2]",
        ),
        ("<style media=print>p{display:none}</style><p>seen", "seen"),
        ("<p>a<dialog>no</dialog><dialog open>yes</dialog>", "a\nyes"),
        (
            "<p><ruby>\u6f22<rt>kan</rt></ruby><ruby>\u5b57<rp>(</rp><rt>ji</rt><rp>)</rp></ruby>",
            "\u6f22(kan)\u5b57(ji)",
        ),
        ("<button>Go</button><button>Stop</button>", "Go Stop"),
        (
            "<ol reversed><li>a<li>b</ol><ol reversed start=9><li>c<li>d</ol>",
            "2. a\n1. b\n9. c\n8. d",
        ),
        ("<table><tr><td rowspan=0>A<td>1<tr><td>2<tr><td>3</table>", "A | 1\nA | 2\nA | 3"),
        ("<table><tfoot><tr><td>Sum<td>3<tbody><tr><td>a<td>3</table>", "a | 3\nSum | 3"),
        (
            "<html xmlns:m='http://www.w3.org/1998/Math/MathML'><p>x <m:math><m:mfrac>"
            "<m:mn>1</m:mn><m:mn>2</m:mn></m:mfrac></m:math>",
            "x 1/2",
        ),
    ],
)
def test_html_is_read_as_it_is_shown(save: Save, markup: str, text: str) -> None:
    assert html(save, markup) == text


def test_html_code_keeps_blank_lines_and_tabs(save: Save) -> None:
    markup = "<p>Code:<pre><code>if x<sup>2</sup>:\n\treturn 1\n\n\nreturn   2\n</code></pre>after"
    assert html(save, markup) == "Code:\n\nif x^2:\n\treturn 1\n\n\nreturn   2\n\nafter"


def test_html_soft_hyphens_and_ligatures_are_no_letters(save: Save) -> None:
    assert html(save, "<p>of&shy;fice \ufb03") == "office ffi"


def test_html_what_styles_hide_is_not_read(save: Save) -> None:
    sheet = (
        "/* .seen {display:none} */ .gone, #away {display:none} p.off{visibility: hidden}"
        "@media print {.seen {display:none}} .back{display:none} .back{display:block}"
        ".a .seen {display:none} .seen:hover{display:none}"
    )
    markup = (
        f"<style>{sheet}</style><p>One<p style='DISPLAY : NONE !important'>no<p class='x gone'>no"
        "<p id=away>no<p class=off>no<div class=off>two</div><p class=seen>three<p class=back>four"
        "<p style='display:none'><b>no</b></p>"
    )
    assert html(save, markup) == "One\n\ntwo\n\nthree\n\nfour"


@pytest.mark.cases(8)
@pytest.mark.parametrize("markup", ["<p>x{}y</p>", "<pre>{}</pre>z", "<td>x{}<td>y"])
@pytest.mark.parametrize("space", ["&nbsp;", "\t", "\xa0 "])
def test_html_with_much_space_is_read_in_time(save: Save, markup: str, space: str) -> None:
    """A pattern that tries every start of a run of spaces would take minutes."""
    text = html(save, markup.format(space * 200_000))
    assert len(text) < 500_000


def test_html_that_is_wrong_is_read_as_browsers_read_it(save: Save) -> None:
    assert html(save, f"<p>x &#{'9' * 5000}; y</p>") == "x \ufffd y"
    assert html(save, "<p>a<![foo bar]]>b</i></div>c<p>d<") == "abc\n\nd<"


@pytest.mark.parametrize("markup", ["<!-- only -->", "\1", "<?xml version='1.0'?>", "<!"])
def test_html_without_any_element_is_refused(save: Save, markup: str) -> None:
    with pytest.raises(DocumentError):
        html(save, markup + "\n")


def test_html_preformatted_text_keeps_its_indentation(save: Save) -> None:
    markup = "<p>x</p><pre>def  f():\n    return 1<br>  # end</pre>y"
    assert html(save, markup) == "x\n\ndef  f():\n    return 1\n  # end\n\ny"


def test_html_encoding_is_utf8_then_what_the_page_declares(save: Save) -> None:
    declared = '<meta charset="cp1254"><p>güneşli bir gün, çok şükür</p>'
    assert html(save, declared.encode("cp1254")) == "güneşli bir gün, çok şükür"
    declared = '<meta charset="cp866"><p>Привет, как дела?</p>'
    assert html(save, declared.encode("cp866")) == "Привет, как дела?"
    assert html(save, '<meta charset="cp866"><p>Grüße</p>'.encode()) == "Grüße"
    assert html(save, '<meta charset="nonsense"><p>Grüße aus Köln</p>'.encode("latin-1")) == (
        "Grüße aus Köln"
    )


@pytest.mark.parametrize("name", ["a.htm", "a.xhtml", "A.HTML"])
@pytest.mark.filterwarnings("error")
def test_xhtml_is_read_without_warnings(save: Save, name: str) -> None:
    markup = '<?xml version="1.0"?><body><p>a <![CDATA[& b]]></p></body>'
    assert read_document(save(name, markup)).text == "a & b"
    assert read_document(save(name, "https://example.org/")).text == "https://example.org/"


def test_html_with_many_gaps_takes_no_quadratic_time(save: Save) -> None:
    def seconds(gaps: int) -> float:
        markup, start = "a" + "<p> </p>" * gaps + "b", time.thread_time()
        assert html(save, markup) == "a\n\nb"
        return time.thread_time() - start

    few, many = (min(seconds(gaps) for _ in range(5)) for gaps in (1500, 6000))
    assert many < 9 * few  # or 16 times that


def test_html_may_nest_deeper_than_python_recurses(save: Save) -> None:
    assert html(save, "<div>" * 2000 + "x") == "x"


def test_html_without_visible_text_is_refused(save: Save) -> None:
    assert "holds no text" in refusal(save("a.html", "<html><script>x</script><p> </p></html>"))


# What stands in no text, or in none that is shown


def test_html_form_values_and_details_are_read(save: Save) -> None:
    markup = (
        "<details><summary>More</summary><p>Inside</details>"
        "<form>Name <input value='Ann &amp; Bo'> <input type=hidden value=no>"
        "<input type=password value=no><br><input type=checkbox checked>yes<br>"
        "<input type=radio>never<br><textarea>two\nlines <b></textarea>"
        "<select><option>a<option selected>b</select><input type=submit value=Send></form>"
        "<p hidden=until-found>found</p>"
    )
    assert html(save, markup) == (
        "More\n\nInside\n\nName Ann & Bo\n[x] yes\n[ ] never\ntwo\nlines <b>\na\n[x] b\nSend\n\n"
        "found"
    )


def test_html_pictures_are_described_and_counted(save: Save) -> None:
    markup = (
        "<p>a <img src=x alt='A  cat'><img src=y><img src=line alt=''>"
        "<svg><title>Sales</title><text>2024</text></svg>"
        "<video>no</video><iframe src=x>no</iframe><object>instead</object>"
    )
    document = read_document(save("a.html", markup))
    assert document.text == "a [Picture: A cat]\n\nSales\n\n2024instead"
    assert document.not_read == (
        "3 pictures",
        "1 video",
        "1 embedded page",
        "1 embedded object",
    )


def test_html_list_numbers_are_those_shown(save: Save) -> None:
    markup = "<ol start=3><li>a<li>b<li value=9>c<li>d</ol><ol start=x><li>e</ol>"
    assert html(save, markup) == "3. a\n4. b\n9. c\n10. d\n1. e"


@pytest.mark.parametrize(
    "markup",
    ["<a ", "<!--", "</", "<?", "<![", "<!", "&", "<p a=b ", "<a x='", "<script>", "<textarea><"],
)
def test_html_of_nothing_but_beginnings_is_read_in_time(save: Save, markup: str) -> None:
    """The parser that Python has takes 48 seconds for 60 KB of the first."""
    started = time.thread_time()
    read_or_refuse(save("a.html", "<p>x</p>" + markup * 100_000))
    assert time.thread_time() - started < 5


def test_html_nested_deeper_than_any_page_is_refused(save: Save) -> None:
    markup = "<div>" * 1_000_000 + "</p>" * 1_000_000
    assert "nests elements more than 2,000 deep" in refusal(save("a.html", markup))
