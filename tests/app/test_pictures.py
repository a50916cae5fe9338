"""Pictures: what is drawn is what was given, in cells, words and for whoever cannot see."""

import re
from html import escape
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlite_app.engine.kept import KeptLayer, KeptMap
from kvlite_app.views.answer import answer_html
from kvlite_app.views.kept_map import draw_kept
from kvlite_app.views.sources import sources_html
from kvlite_app.views.svg import STEPS, STRENGTHS, WIDTH, percent

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '"><script>alert(1)</script><img src=x onerror="a()">&amp;\x00\x1b\u202egpj\ud800.pdf'


def parsed(svg: str) -> Element:
    """The picture, which every one of these has to be."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    name, said = root[0].text, root[1].text
    assert root.get("aria-label") == f"{name}. {said}"
    box = root.get("viewBox", "").split()
    assert box[:3] == ["0", "0", str(WIDTH)]
    names = {each.tag.removeprefix(SVG) for each in root.iter()}
    assert names <= {"svg", "title", "desc", "g", "rect", "path", "text"}
    for each in root.iter():
        assert not [key for key in each.attrib if key.startswith("on") or "href" in key]
        paint = {each.get("fill"), each.get("stroke")} - {None, "none", "currentColor"}
        assert all(str(colour).startswith("var(--kvlite-") for colour in paint)
    return root


def titles(root: Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}title")][1:]


def texts(root: Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def rows(root: Element) -> list[Element]:
    """Groups of a layer."""
    return [each for each in root.iter(f"{SVG}g") if (_title(each) or "").startswith("Layer")]


def _title(group: Element) -> str | None:
    first = group.find(f"{SVG}title")
    return None if first is None else first.text


def cells(row: Element, colour: str, bins: int) -> list[float]:
    """The strength of each cell of a row, 0 where there is none."""
    made = [0.0] * bins
    for group in row.iter(f"{SVG}g"):
        if colour in (group.get("stroke") or ""):
            for path in group:
                for at, count in re.findall(r"M(\d+) [\d.]+h(\d+)", path.get("d", "")):
                    for each in range(int(at), int(at) + int(count)):
                        assert not made[each]
                        made[each] = float(path.get("stroke-opacity", "1"))
    return made


def strength(per_cent: int) -> float:
    if not per_cent:
        return 0.0
    return float(STRENGTHS[min(at for at, most in enumerate(STEPS) if per_cent <= most)])


def layer(held: list[int], back: list[int] | None = None, window: int | None = None) -> KeptLayer:
    again = back or [0] * len(held)
    mean, came = sum(held) // max(1, len(held)), sum(again) // max(1, len(held))
    return KeptLayer(window, tuple(held), tuple(again), mean, came)


lines = st.lists(st.integers(0, 100), min_size=7, max_size=7)


@given(st.lists(st.tuples(lines, lines, st.sampled_from([None, 512])), min_size=1, max_size=6))
@settings(deadline=None)
def test_every_bin_of_every_layer_has_its_cell(
    given: list[tuple[list[int], list[int], int | None]],
) -> None:
    kept = KeptMap(700, 650, tuple(layer(*each) for each in given))
    root = parsed(draw_kept(kept))
    drawn = rows(root)
    assert len(drawn) == len(given)
    for row, (held, back, window) in zip(drawn, given, strict=True):
        assert cells(row, "held", 7) == [strength(each) for each in held]
        assert cells(row, "back", 7) == [strength(each) for each in back]
        said = _title(row) or ""
        assert f"{sum(held) // 7}% kept" in said
        assert ("sliding window of 512" in said) == (window is not None)
    assert [_title(row) for row in drawn] == titles(root)
    assert ("the answer begins" in texts(root)) and ("position in tokens" in texts(root))
    marked = any(each[2] for each in given)
    assert ("sliding window of 512 tokens" in texts(root)) == marked
    came = any(sum(each[1]) >= 7 for each in given)
    assert any("came back" in each for each in texts(root)) == came


def test_the_map_in_words() -> None:
    kept = KeptMap(900, 880, (layer([50], [4]), layer([10]), layer([3], window=64)))
    said = parsed(draw_kept(kept)).get("aria-label") or ""
    assert "3 layers, 900 tokens: 21% are kept" in said
    assert "Layer 0 keeps most (50%), layer 2 least (3%)." in said
    assert "1% came back while answering." in said
    assert "sliding window of 64 tokens" in said


def test_shares_as_people_write_them() -> None:
    written = [percent(share) for share in (0, 1e-9, 0.0099, 0.01, 0.5, 0.9999, 1)]
    assert written == ["0%", "under 1%", "under 1%", "1%", "50%", "99%", "100%"]


def test_sources_are_text_with_the_document_around_them() -> None:
    passage = {"document": HOSTILE, "where": "page 3", "text": HOSTILE, "passage": HOSTILE}
    source = {**passage, "before": f"{'a' * 5000}<b>\n\n", "after": f"$$x$${HOSTILE}"}
    shown_html = sources_html([source, source], "k")
    assert not re.search(r"<script|<img|<b>(?!\d<)|\n|\$\$", shown_html)
    assert shown_html.count("<mark>") == shown_html.count('name="sources-k"') == 2
    assert f"&lt;b&gt;&#10;&#10;<mark>{escape(HOSTILE)}</mark>" in shown_html
    assert len(shown_html) < 6000


def test_an_account_is_a_picture_of_what_was_kept() -> None:
    kept = KeptMap(9, 9, (layer([5]),)).to_json()
    assert "<figure>" in answer_html({"brief": "from all", "kept": kept})
    assert "<p>from all &lt;b&gt;</p>" in answer_html({"brief": "from all <b>"})
