"""Which settings are recommended, from rows that were made up."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvlite.bench.advice import TuneRow, advise, comparable, frontier, in_race, lost
from kvlite.bench.fork import Choice, Recalled
from kvlite.bench.rows import tallies
from kvlite.cache.bits import parse_kv_bits
from kvlite.methods import parse_method

LENGTH = 1000
FULL = Choice(parse_method("full"), LENGTH)
FEW = Choice(parse_method("spans"), 60, None, Recalled(128))
MANY = Choice(parse_method("spans"), 250, None, Recalled(128))
PACKED = Choice(parse_method("snapkv"), 250, parse_kv_bits("4"))
BYTES = {FULL: 1000, FEW: 60, MANY: 250, PACKED: 100}


def rows(choice: Choice, *losses: float) -> list[TuneRow]:
    """A fact and a passage for each loss."""
    return [
        TuneRow(
            kind=kind,
            part=part,
            length=LENGTH,
            **choice.columns,
            entries_mean=choice.budget,
            kv_bytes=BYTES.get(choice, choice.budget),
            lost=loss,
            known=float(loss < 1),
        )
        for part, loss in enumerate(losses)
        for kind in ("fact", "passage")
    ]


def advised(most_lost: float, **losses: tuple[float, ...]) -> tuple[dict[str, object], str]:
    measured = {FULL: (0.0, 0.0, 0.0)}
    measured |= {globals()[name.upper()]: each for name, each in losses.items()}
    table = [row for choice, each in measured.items() for row in rows(choice, *each)]
    advice = advise(table, list(measured), most_lost)
    assert advice is not None
    return dict(advice.values), advice.reason


def test_the_smallest_that_loses_little_enough() -> None:
    few, packed, many = (0.5, 0.3, 0.4), (0.1, 0.06, 0.0), (0.0, 0.02, 0.3)
    values, reason = advised(0.1, few=few, packed=packed, many=many)
    assert values == {"method": "snapkv", "kv_bits": "4", "budget": "25%", "recall": "off"}
    assert "knows 2 of 2 hidden facts (the full cache 2 of 2) and loses 0.080 nats" in reason
    assert reason.endswith("it loses 0.000, and the default method with no more bytes 0.400.")
    assert advised(0.45, few=few, packed=packed, many=many)[0] == {
        "method": "spans",
        "kv_bits": "16",
        "budget": "6%",
        "recall": "auto",
        "recall_entries": 128,
        "recall_bits": "16",
    }


def test_what_the_default_beats_on_parts_held_back_is_not_recommended() -> None:
    """The parts with the number 2 check the choice; the others alone decide."""
    few, packed, many = (0.5, 0.3, 0.4), (0.1, 0.06, 0.5), (0.0, 0.02, 0.3)
    values, _ = advised(0.1, few=few, packed=packed, many=many)
    assert (values["method"], values["budget"]) == ("spans", "25%")


def test_where_all_lose_too_much_the_one_that_loses_least() -> None:
    values, reason = advised(0.0, few=(0.5, 0.3, 0.4), many=(0.2, 0.2, 0.3))
    assert values == {"method": "full", "kv_bits": "16", "recall": "off"}
    assert "keeps everything" in reason
    table = [row for choice in (FEW, MANY) for row in rows(choice, 0.2 if choice is MANY else 0.4)]
    table += rows(FULL, 9.0)
    advice = advise(table, [FULL, FEW, MANY], 0.1)
    assert advice is not None and "nothing loses less, though 0.1 was asked for" in advice.reason
    assert advice.values["budget"] == "25%"


def test_only_parts_that_all_have_read_count() -> None:
    table = [*rows(FULL, 0.0), *rows(FEW, 0.2)]
    assert advise(table[:2], [FULL, FEW], 0.1) is None
    advice = advise(table[:3], [FULL, FEW], 0.1)  # the fact, and not yet the passage
    assert advice is not None and "1 of 1 hidden facts" in advice.reason
    assert advice.reason.endswith("No part was left to check that: given more time, it goes on.")


def test_the_half_that_loses_most_beside_as_few_bytes_drops_out() -> None:
    """But not what nothing beats, the full cache, or the default with recall."""
    one, *others, near = (Choice(parse_method("snapkv"), budget) for budget in (50, *range(61, 68)))
    losses = {FULL: 0.0, FEW: 0.4, MANY: 0.6, one: 3.0, near: 0.41}
    losses |= {each: 0.5 + 0.1 * index for index, each in enumerate(others)}
    choices = [*losses]

    def part(number: int, left: Sequence[Choice]) -> list[TuneRow]:
        return [replace(row, part=number) for each in left for row in rows(each, losses[each])]

    first = part(0, choices)
    assert in_race([], choices) == in_race(first[:-1], choices) == choices
    assert not in_race(first, [])
    left = in_race(first, choices)
    assert {*left} == {FULL, FEW, MANY, one, near, others[0]}
    assert {row.budget for row in comparable(first, choices)} == {each.budget for each in left}
    second = in_race([*first, *part(1, left)], choices)
    assert {*second} == {FULL, FEW, MANY, one}
    # What drops out is not measured again, and one part checks what the others have chosen.
    rest = [*first, *part(1, left), *part(2, second), *part(3, second)]
    assert {*in_race(rest[: -2 * len(second)], choices)} == {*in_race(rest, choices)} == {*second}
    assert {row.part for row in comparable(rest, choices)} == {0, 1, 2, 3}
    assert in_race(part(2, choices), choices) == choices


def test_the_frontier_is_what_nothing_beats_in_both() -> None:
    table = [*rows(FULL, 0.0), *rows(FEW, 0.2), *rows(MANY, 0.2), *rows(PACKED, 0.3)]
    assert [each.kv_bytes for each in frontier(tallies(table))] == [60, 1000]
    assert lost(table[2:4]) == pytest.approx(0.2)
    uneven = [*rows(FEW, 0.2), *rows(FEW, 0.2, 0.8)[2:3]]  # two facts and a passage
    assert lost(uneven) == pytest.approx(((0.2 + 0.8) / 2 + 0.2) / 2)


def test_what_is_smaller_than_any_default_is_checked_alone() -> None:
    small = Choice(parse_method("snapkv"), 50, parse_kv_bits("4"))
    table = [*rows(FULL, 0, 0, 0), *rows(FEW, 0.2, 0.2, 0.2), *rows(small, 0.1, 0.1, 0.3)]
    advice = advise(table, [FULL, FEW, small], 0.1)
    assert advice is not None and advice.values["budget"] == "5%"
    assert advice.reason.endswith(
        "it loses 0.300, and the default method takes more bytes at every budget measured."
    )
