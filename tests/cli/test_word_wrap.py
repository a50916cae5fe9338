"""Answers that come token by token are broken between words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvlite.cli.word_wrap import WordWrap, option_wrapped, part_wrapped

PARTS = st.lists(st.text(st.sampled_from("ab \n字-"), max_size=9), max_size=20)


def wrapped(parts: list[str], width: int) -> str:
    wrap = WordWrap(lambda: width)
    return "".join(map(wrap.push, parts)) + wrap.flush()


def test_lines_are_broken_between_words_whatever_the_tokens() -> None:
    text = "The term of office of the President is four years."
    expected = "The term of office\nof the President is\nfour years."
    assert wrapped([text], 20) == expected
    assert wrapped(list(text), 20) == expected
    assert (
        wrapped(["The te", "rm of off", "ice of the Presi", "dent is four", " years."], 20)
        == expected
    )


def test_a_line_of_parts_is_broken_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    line = "kept all 61 \u00b7 KV 46.0 MiB \u00b7 first token 30.6 s"
    assert part_wrapped(line) == "kept all 61 \u00b7 KV 46.0 MiB \u00b7\nfirst token 30.6 s"


def test_indentation_and_empty_lines_stay() -> None:
    text = "A list:\n\n  - one\n    - two and\n"
    assert wrapped([text], 30) == text


@given(PARTS, st.integers(1, 12))
def test_nothing_is_lost_and_lines_fit(parts: list[str], width: int) -> None:
    text, made = "".join(parts), wrapped(parts, width)
    assert made.split() == text.split() or "".join(made.split()) == "".join(text.split())
    for line in made.split("\n"):
        long_word = any(cell_len(word) > width for word in line.split())
        assert cell_len(line.rstrip()) <= width or long_word or line.startswith(" ")


@given(PARTS, st.integers(1, 12))
def test_it_does_not_matter_where_parts_end(parts: list[str], width: int) -> None:
    assert wrapped(parts, width) == wrapped(["".join(parts)], width)


def test_methods_are_broken_between_options() -> None:
    method = "simlayerkv:threshold=0.9865+spans, 8 bits"
    broken = "simlayerkv:\nthreshold=0.9865+spans,\n8 bits"
    assert option_wrapped(method, 24) == broken
    assert option_wrapped(method, 80) == method
    assert option_wrapped("1,024", 24) == "1,024" and option_wrapped("", 9) == ""
