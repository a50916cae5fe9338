"""The visible text of web pages."""

import time

import pytest

from kvlite.documents import read_document

from .files import Save, read_or_refuse, refusal


def html(save: Save, markup: str | bytes) -> str:
    return read_document(save("a.html", markup)).text


# What is shown of markup, by what it is about.
SHOWN: dict[str, tuple[str, str]] = {
    "visible text": (
        "<!DOCTYPE html><html><head><title>T &amp; x</title><style>p{}</style></head><body>"
        "<script>var a = '<p>no</p>';</script><template>no</template><noscript>no</noscript>"
        "<h1>Head</h1>\n\n<p>One  <b> two</b>,\nthree<!-- no -->.</p>\n<p></p><p>Four</p>"
        "<p hidden>no</p>"
        "<div>a<div>b</div></div>c<br>d<br><br>e</body></html>",
        "T & x\n\nHead\n\nOne two, three.\n\nFour\n\na\nb\nc\nd\n\ne",
    ),
    "lists": (
        "<p>x<ul><li><p>a</p></li>\n<li>b<ul><li>c</li></ul></li></ul><ol><li>d<li>e</ol>f",
        "x\n- a\n- b\n  - c\n1. d\n2. e\n\nf",
    ),
    "numbers of lists": (
        "<ol start=3><li>a<li>b<li value=9>c<li>d</ol><ol start=x><li>e</ol>"
        "<ol reversed><li>a<li>b</ol><ol reversed start=9><li>c<li>d</ol>",
        "3. a\n4. b\n9. c\n10. d\n1. e\n2. a\n1. b\n9. c\n8. d",
    ),
    "cells are kept apart": (
        "<table><thead><tr><th></th><th>Price</th></tr></thead>\n<tr>\n<td><p>Pear</p></td>\n"
        "<td><p>3</p></td>\n</tr><tr><td>Fig<td>4</table>",
        "| Price\nPear | 3\nFig | 4",
    ),
    "an empty table": ("<p>a</p><table><tr></tr></table><p>b</p>", "a\n\nb"),
    "a cell over all rows": (
        "<table><tr><td rowspan=0>A<td>1<tr><td>2<tr><td>3</table>",
        "A | 1\nA | 2\nA | 3",
    ),
    "a foot comes last": (
        "<table><tfoot><tr><td>Sum<td>3<tbody><tr><td>a<td>3</table>",
        "a | 3\nSum | 3",
    ),
    "raised and lowered": (
        "10<sup>6</sup> units, H<sub>2</sub>O, a<sub>1</sub>2, x<sup>n+1</sup>, "
        "in 1990<sup><a href='#f'>3</a></sup>, so<a epub:type=noteref>4</a> "
        "it<a role=doc-noteref><sup>5</sup></a>, x<sup>1</sup><sup>2</sup> "
        "<sup><a href=#a>1</a></sup><sup><a href=#b>2</a></sup>.",
        "10^6 units, H_2O, a_(1)2, x^(n+1), in 1990[3], so[4] it[5], x^12 [1][2].",
    ),
    "raised by styles": (
        "<style>.c5{vertical-align:super}</style><p>10<span style='vertical-align:super'>6</span> "
        "<a style='vertical-align:sub'>i</a> 10<span class=c5>6</span>",
        "10^6 _i 10^6",
    ),
    "formulas with a prefix": (
        "<html xmlns:m='http://www.w3.org/1998/Math/MathML'><p>x <m:math><m:mfrac>"
        "<m:mn>1</m:mn><m:mn>2</m:mn></m:mfrac></m:math>",
        "x 1/2",
    ),
    "struck": (
        "<style>i{text-decoration-line:line-through}</style>"
        "<p>Price: <s>50</s> 40. <del>Closed</del><ins>Open</ins> a <i>b</i>",
        "Price: ~~50~~ 40. ~~Closed~~Open a ~~b~~",
    ),
    "hidden by styles": (
        "<style>/* .seen {display:none} */ .gone, #away {display:none} p.off{visibility: hidden}"
        "@media print {.seen {display:none}} .back{display:none} .back{display:block}"
        ".a .seen {display:none} .seen:hover{display:none}</style>"
        "<style media=print>p{display:none}</style>"
        "<p>One<p style='DISPLAY : NONE !important'>no<p class='x gone'>no"
        "<p id=away>no<p class=off>no<div class=off>two</div><p class=seen>three<p class=back>four"
        "<p style='display:none'><b>no</b></p>",
        "One\n\ntwo\n\nthree\n\nfour",
    ),
    "dialogs": ("<p>a<dialog>no</dialog><dialog open>yes</dialog>", "a\nyes"),
    "ruby": (
        "<p><ruby>\u6f22<rt>kan</rt></ruby><ruby>\u5b57<rp>(</rp><rt>ji</rt><rp>)</rp></ruby>",
        "\u6f22(kan)\u5b57(ji)",
    ),
    "buttons": ("<button>Go</button><button>Stop</button>", "Go Stop"),
    "code": (
        "<p>Code:<pre><code>if x<sup>2</sup>:\n\treturn 1\n\n\nreturn   2<br>  # end\n</code></pre>"
        "after",
        "Code:\n\nif x^2:\n\treturn 1\n\n\nreturn   2\n  # end\n\nafter",
    ),
    "soft hyphens and ligatures": ("<p>of&shy;fice \ufb03", "office ffi"),
    "a number of no character": (f"<p>x &#{'9' * 5000}; y</p>", "x \ufffd y"),
    "wrong markup": ("<p>a<![foo bar]]>b</i></div>c<p>d<", "abc\n\nd<"),
    "deeper than Python recurses": ("<div>" * 2000 + "x", "x"),
    "forms and details": (
        "<details><summary>More</summary><p>Inside</details>"
        "<form>Name <input value='Ann &amp; Bo'> <input type=hidden value=no>"
        "<input type=password value=no><br><input type=checkbox checked>yes<br>"
        "<input type=radio>never<br><textarea>two\nlines <b></textarea>"
        "<select><option>a<option selected>b</select><input type=submit value=Send></form>"
        "<p hidden=until-found>found</p>",
        "More\n\nInside\n\nName Ann & Bo\n[x] yes\n[ ] never\ntwo\nlines <b>\na\n[x] b\nSend\n\n"
        "found",
    ),
}


@pytest.mark.parametrize("about", SHOWN)
def test_html_is_read_as_it_is_shown(save: Save, about: str) -> None:
    markup, text = SHOWN[about]
    assert html(save, markup) == text


def test_html_pictures_are_described_and_counted(save: Save) -> None:
    markup = (
        "<p>a <img src=x alt='A  cat'><img src=y><img src=line alt=''>"
        "<svg><title>Sales</title><text>2024</text></svg>"
        "<video>no</video><iframe src=x>no</iframe><object>instead</object>"
    )
    document = read_document(save("a.html", markup))
    assert document.text == "a [Picture: A cat]\n\nSales\n\n2024instead"
    assert document.not_read == (
        *("3 pictures", "1 video", "1 embedded page", "1 embedded object"),
    )


@pytest.mark.parametrize(
    ("text", "encoding", "declared"),
    [
        ("güneşli bir gün, çok şükür", "cp1254", "cp1254"),
        ("Привет, как дела?", "cp866", "cp866"),
        ("Grüße", "utf-8", "cp866"),
        ("Grüße aus Köln", "latin-1", "nonsense"),
    ],
)
def test_html_encoding_is_utf8_then_what_the_page_declares(
    save: Save, text: str, encoding: str, declared: str
) -> None:
    assert html(save, f'<meta charset="{declared}"><p>{text}</p>'.encode(encoding)) == text


@pytest.mark.filterwarnings("error")
def test_xhtml_is_read_without_warnings(save: Save) -> None:
    markup = '<?xml version="1.0"?><body><p>a <![CDATA[& b]]></p></body>'
    for name in ("a.htm", "a.xhtml", "A.HTML"):
        assert read_document(save(name, markup)).text == "a & b"
        assert read_document(save(name, "https://example.org/")).text == "https://example.org/"


@pytest.mark.parametrize(
    ("markup", "said"),
    [
        ("<!-- only -->\n", ""),
        ("\1\n", ""),
        ("<?xml version='1.0'?>\n", ""),
        ("<!\n", ""),
        ("<html><script>x</script><p> </p></html>", "holds no text"),
        ("<div>" * 1_000_000 + "</p>" * 1_000_000, "nests elements more than 2,000 deep"),
    ],
    ids=["comment", "control", "declaration", "beginning", "script", "nested"],
)
def test_html_without_anything_to_read_is_refused(save: Save, markup: str, said: str) -> None:
    assert said in refusal(save("a.html", markup))


LONG = {
    "spaces": "<p>x{}y</p>".format("&nbsp;" * 200_000),
    "spaces in code": "<pre>{}</pre>z".format("\xa0 " * 200_000),
    "spaces in cells": "<td>x{}<td>y".format("\t" * 200_000),
    "gaps": "a" + "<p> </p>" * 20_000 + "b",
    "wide cells": "<table><tr><td colspan=9999 rowspan=9999>" + "long " * 100 + "</table>",
    "unclosed formulas": "<p>a <math><mrow>" + "<mrow>" * 70 + "<sup>x</sup></math> after",
    **{
        f"beginnings {each}": "<p>x</p>" + each * 100_000
        for each in ("<a ", "<!--", "</", "<![", "&", "<p a=b ", "<a x='", "<textarea><")
    },
}


@pytest.mark.parametrize("about", LONG)
def test_long_html_is_read_in_time(save: Save, about: str) -> None:
    """A pattern that tries every start of a run of spaces would take minutes; the parser that
    Python has takes 48 seconds for 60 KB of `<a `."""
    path, started = save("a.html", LONG[about]), time.thread_time()
    if about.startswith("beginnings"):
        read_or_refuse(path)
    else:
        text = read_document(path).text
        assert len(text) < (10_000 if about == "wide cells" else 500_000)
        assert about != "unclosed formulas" or text.endswith("after")
    assert time.thread_time() - started < 5
