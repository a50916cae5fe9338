"""Pictures: what is drawn is what was given, in cells, words and for whoever cannot see."""

import re
from itertools import pairwise
from random import Random
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlite.methods.rank import layer_groups
from kvlite_app.engine.kept import KeptLayer, KeptMap
from kvlite_app.engine.pages import PageShare
from kvlite_app.views.pictures import draw_heads, draw_kept, draw_pages, told
from kvlite_app.views.pictures.kept_map import MOST_RUNS
from kvlite_app.views.pictures.svg import STEPS, STRENGTHS, WIDTH, percent, runs, short, shown
from tests.conftest import make_tiny

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
    assert names <= {"svg", "title", "desc", "g", "rect", "path", "text", "circle"}
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
        assert f"{sum(held) // 7}% held" in said
        assert ("sliding window of 512" in said) == (window is not None)
    assert [_title(row) for row in drawn] == titles(root)
    assert ("the answer begins" in texts(root)) and ("position in tokens" in texts(root))
    marked = any(each[2] for each in given)
    assert ("sliding window of 512 tokens" in texts(root)) == marked
    came = any(sum(each[1]) >= 7 for each in given)
    assert any("came back" in each for each in texts(root)) == came


def test_bars_are_as_long_as_what_each_layer_holds() -> None:
    kept = KeptMap(10, 10, (layer([40, 40], [10, 10]), layer([20, 20])))
    bars = []
    for row in rows(parsed(draw_kept(kept))):
        rects = [each for each in row.findall(f"{SVG}rect") if "var" in (each.get("fill") or "")]
        bars.append([float(each.get("width", "0")) for each in rects])
    whole = WIDTH - 372
    assert bars[0] == pytest.approx([whole * 0.75, whole * 0.25], abs=0.1)
    assert bars[1] == pytest.approx([whole * 0.5], abs=0.1)


def test_the_map_in_words() -> None:
    kept = KeptMap(900, 880, (layer([50], [4]), layer([10]), layer([3], window=64)))
    said = parsed(draw_kept(kept)).get("aria-label") or ""
    assert "3 layers, 900 tokens: 21% are held" in said
    assert "Layer 0 holds most (50%), layer 2 least (3%)." in said
    assert "1% came back while answering." in said
    assert "sliding window of 64 tokens" in said


@pytest.mark.parametrize("layers", [1, 30, 80, 126])
def test_the_wildest_map_is_no_larger_than_a_page_should_load(layers: int) -> None:
    draw = Random(1)
    wild = [
        layer(*([draw.choice((0, 5, 20, 40, 60, 90, 100)) for _ in range(240)] for _ in range(2)))
        for _ in range(layers)
    ]
    svg = draw_kept(KeptMap(10**6, 10**6 - 5, tuple(wild)))
    root = parsed(svg)
    assert len(svg.encode()) < 150_000
    assert len(rows(root)) == layers
    assert svg.count("h") > min(480 * layers, MOST_RUNS) / 5
    numbers = [each for each in texts(root) if each.isdecimal() and int(each) < layers]
    assert 1 <= len(numbers) <= 30


def test_nothing_was_read() -> None:
    assert "Nothing was read yet." in texts(parsed(draw_kept(KeptMap(0, 0, (layer([]),)))))


def page(number: int, held: float, back: float = 0, **other: object) -> PageShare:
    given = {"place": 0, "document": "a.pdf", "label": f"page {number}", "tokens": 300}
    return PageShare(**{**given, **other}, held=held, back=back)  # type: ignore[arg-type]


def test_every_page_has_a_cell_and_says_what_it_is() -> None:
    pages = [page(1, 0.2), page(2, 0.9, 0.3), page(3, 0), page(4, 0, tokens=0), page(5, 0.004)]
    root = parsed(draw_pages(pages))
    assert titles(root) == [
        "page 1: 20% held; 300 tokens",
        "page 2: 90% held, 30% came back while answering; 300 tokens",
        "page 3: 0% held; 300 tokens",
        "page 4: no text",
        "page 5: under 1% held; 300 tokens",
    ]
    groups = [each for each in root.iter(f"{SVG}g") if _title(each)]
    held = [[each for each in group if "held" in each.get("fill", "")] for group in groups]
    assert [len(each) for each in held] == [1, 1, 0, 0, 1]
    strengths = [float(each[0].get("fill-opacity", "1")) for each in held if each]
    assert strengths[1] > strengths[0] > strengths[2] > 0.1
    again = [each for each in groups[1] if "back" in each.get("fill", "")]
    part = float(again[0].get("height", "0")) / float(held[1][0].get("height", "1"))
    assert part == pytest.approx(0.3 / 0.6, abs=0.01)
    framed = [group for group in groups if any(each.get("stroke") for each in group)]
    assert [_title(each) for each in framed] == [titles(root)[1]]


def test_the_pages_in_words_are_drawn_too() -> None:
    pages = [page(n, 0.05) for n in range(1, 9)]
    pages += [page(9, 0.5, 0.2), page(10, 0, document="b.pdf", place=1)]
    said = told(pages)
    assert said == (
        "Held most: page 9 (50%) of a.pdf. Nothing is held of 1 page. "
        "While answering came back: page 9 (20%) of a.pdf."
    )
    root = parsed(draw_pages(pages))
    assert " ".join(texts(root)).startswith(said)
    assert [each for each in texts(root) if each.endswith(".pdf")] == ["a.pdf", "b.pdf"]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([1.0, 1.0], "The answer was made from all pages, whole."),
        ([0.3, 0.3], "All pages are held alike, 30% of each."),
        ([0.8, 0.9], "No page stands out: 80% to 90% of each is held."),
        ([0.0, 0.0], "Nothing is held of any page."),
        ([0.0, 0.6, 0.0], "Held most: page 2 (60%). Nothing is held of page 1, page 3."),
        ([0.999, 0.4], "Held most: page 1 (99%)."),
        ([], "No pages were read."),
    ],
)
def test_what_is_said_of_pages(shares: list[float], said: str) -> None:
    pages = [page(number, share) for number, share in enumerate(shares, 1)]
    assert told(pages) == said
    assert said in " ".join(texts(parsed(draw_pages(pages))))


@pytest.mark.parametrize("count", [1, 20, 21, 300, 1000])
def test_many_pages_go_in_rows_within_the_picture(count: int) -> None:
    svg = draw_pages([page(n, n / count, n / count / 2) for n in range(1, count + 1)])
    root = parsed(svg)
    width, height = (float(each) for each in root.get("viewBox", "").split()[2:])
    places = set()
    for group in root.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        assert rect is not None
        x, y, w, h = (float(rect.get(each, "0")) for each in ("x", "y", "width", "height"))
        assert 0 <= x <= width - w
        assert 0 <= y <= height - h
        places.add((x, y))
    assert len(places) == count
    assert len(svg) < 500 * count + 2000


def test_a_hostile_name_is_text_and_nothing_else() -> None:
    pages = [page(1, 0.9, 0.1, document=HOSTILE), page(2, 0.1, place=1)]
    svg = draw_pages(pages, name=HOSTILE)
    root = parsed(svg)
    names = [each for each in texts(root) if each.startswith('"><script>')]
    assert names
    assert not re.search("<script|<img|\u202e|\x00|\x1b|\ud800", svg)
    svg.encode()
    assert root[0].text == shown(HOSTILE)
    kept = KeptMap(9, 9, (layer([5]),))
    assert parsed(draw_kept(kept, name=HOSTILE))[0].text == shown(HOSTILE)


def test_heads_are_stronger_the_higher_they_rank() -> None:
    calibration = make_tiny("llama").model.calibration
    assert calibration is not None
    ranks = ((5.0, 1.0), (4.0, 2.0), (3.0, 3.0), (1.0, 5.0))
    calibration = type(calibration)(**{**calibration.__dict__, "head_ranks": ranks})
    root = parsed(draw_heads(calibration))
    columns = rows(root)
    assert [_title(each) for each in columns] == [
        f"Layer {at}: {first}, {second}" for at, (first, second) in enumerate(ranks)
    ]
    drawn = {
        rank: strong
        for column, heads in zip(columns, ranks, strict=True)
        for strong, rank in zip(cells(column, "held", 2), heads, strict=True)
    }
    order = sorted(drawn)
    assert all(drawn[low] < drawn[high] for low, high in pairwise(order))
    assert (drawn[1.0], drawn[5.0]) == (STRENGTHS[0], 1)
    # Of two heads the first won in each layer, whatever the ranks here: it alone has a dot.
    for column in columns:
        (turned,) = re.findall(r"matrix\(0 ([\d.]+) 1 0 [\d.]+ (\d+)\)", column[1].get("transform"))
        tall, top = map(float, turned)
        (dot,) = re.findall(r"M[\d.]+ ([\d.]+)h0", column[2].get("d", ""))
        assert float(dot) == pytest.approx(top + tall / 2, abs=0.1)
    groups = [each for each in titles(root) if each.startswith("Group")]
    assert layer_groups(calibration.layer_ranks, 1.0) == [0, 1, 1, 2]
    assert groups == ["Group 1: layer 0", "Group 2: layers 1 to 2", "Group 3: layer 3"]
    assert "3 groups of layers" in (root.get("aria-label") or "")
    assert "first group" in " ".join(texts(root))
    assert "first group" not in " ".join(texts(parsed(draw_heads(calibration, groups=1))))


def test_heads_of_the_largest_models_fit() -> None:
    calibration = make_tiny("llama").model.calibration
    assert calibration is not None
    for layers, heads in ((80, 64), (126, 8), (1, 1)):
        changed = {
            "head_ranks": tuple(tuple(1.0 + h + n for h in range(heads)) for n in range(layers)),
            "head_wins": ((1,) * heads,) * layers,
            "layer_ranks": (3.0,) * layers,
        }
        svg = draw_heads(type(calibration)(**{**calibration.__dict__, **changed}))
        root = parsed(svg)
        assert len(rows(root)) == layers
        assert all(len(cells(each, "held", heads)) == heads for each in rows(root))
        for left in re.findall(r"matrix\(0 [\d.]+ 1 0 ([\d.]+)", svg):
            assert 0 <= float(left) < WIDTH
        assert len(svg) < 150_000


@given(st.lists(st.integers(-1, 3)))
def test_runs_say_all_there_is(steps: list[int]) -> None:
    made = runs(steps)
    assert [each for each, _, count in made for _ in range(count)] == steps
    assert [at for _, at, _ in made] == [sum(n for _, _, n in made[:k]) for k in range(len(made))]
    assert all(one[0] != other[0] for one, other in pairwise(made))


@pytest.mark.long
@given(st.text(max_size=40), st.integers(4, 30))
def test_long_names_keep_beginning_and_end(text: str, most: int) -> None:
    cut = short(text, most)
    assert len(cut) == min(len(text), most)
    if len(text) > most:
        assert text.startswith(cut.partition("…")[0])
        assert text.endswith(cut[len(cut) - most // 3 :])


def test_shares_as_people_write_them() -> None:
    written = [percent(share) for share in (0, 1e-9, 0.0099, 0.01, 0.5, 0.9999, 1)]
    assert written == ["0%", "under 1%", "under 1%", "1%", "50%", "99%", "100%"]
