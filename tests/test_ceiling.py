"""What `--budget auto` keeps, as memory comes and goes."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

import kvlite
from kvlite.cache import KVBits
from kvlite.planner.ceiling import EIGHT, what_fits

PLENTY, NONE = 1 << 40, -1
SECOND, THIRD = [*range(5, 405)], [*range(7, 57)]


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (100_000, (10_000, None)),
        (50_000, (10_000, EIGHT)),
        (49_999, (4992, None)),
        (9, (640, None)),
    ],
)
def test_everything_then_8_bits_then_what_fits(room: int, kept: tuple[int, KVBits | None]) -> None:
    def missing(entries: int, bits: KVBits | None) -> int:
        return entries * (10 if bits is None else 5) - room

    assert what_fits(missing, 10_000, 640, may_round=True) == kept


def test_peaks_that_bend_or_jump_are_met_from_below() -> None:
    def missing(entries: int, bits: KVBits | None) -> int:
        bent = max(3000, 2 * entries - 2000)
        return bent + (0 if entries == 10_000 else 5000) - 14_000

    entries, bits = what_fits(missing, 10_000, 640, may_round=False)
    assert bits is None and missing(entries, bits) <= 0 < missing(entries + 640, bits)


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> kvlite.Runner:
    return kvlite.load(str(tiny_folder), device="cpu")


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes that turns may take, which a test changes."""
    room = [PLENTY]
    monkeypatch.setattr("kvlite.conversation.what_is_kept.spare_for", lambda turn: room[0])
    yield room


def talk(runner: kvlite.Runner, **settings: object) -> kvlite.Conversation:
    return runner.conversation(measure="tensors", temperature=0.0, **settings)


def test_a_conversation_is_cut_and_takes_its_entries_back(
    runner: kvlite.Runner, spare: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.methods.budget.AUTO_LEAST", 64)
    whole, cut = talk(runner, budget="100%"), talk(runner)
    for each in (whole, cut):
        each.read([*range(3, 303)])
    assert cut.store is None
    spare[0] = NONE
    cut.read(SECOND)
    assert cut.context.cache.entries_mean < 100 and cut.store.seen == 700
    whole.read(SECOND)
    spare[0] = PLENTY
    answers = [each.generate(THIRD, max_new_tokens=8) for each in (whole, cut)]
    assert answers[0].token_ids == answers[1].token_ids
    kept = answers[1].metrics
    assert kept.kept_entries_mean == kept.seen_tokens == 757


def test_8_bits_come_first_and_need_no_host_memory(runner: kvlite.Runner, spare: list[int]) -> None:
    before = talk(runner, max_new_tokens=2)
    before.read([*range(3, 303)])
    turn = before.context.next_turn(SECOND, before.config)
    spare[0] = turn.wanted - 1
    said = before.generate(SECOND).metrics
    assert said.kv_bits == "8" and said.kept_entries_mean == said.seen_tokens
    assert not said.host_kv_bytes
    assert any("lacking to keep everything: the cache has 8 bits" in each for each in said.notes)


def test_a_turn_that_was_stopped_while_it_was_cut_loses_nothing(
    runner: kvlite.Runner, spare: list[int]
) -> None:
    whole, cut = talk(runner, budget="100%"), talk(runner)
    for each in (whole, cut):
        each.read([*range(3, 303)])
    spare[0] = NONE
    cancel = Event()
    callbacks = kvlite.Callbacks(progress=lambda done, _: cancel.set(), cancel=cancel)
    with pytest.raises(kvlite.Stopped):
        cut.read(SECOND, callbacks=callbacks)
    spare[0] = PLENTY
    answers = [each.generate(THIRD, max_new_tokens=8).token_ids for each in (whole, cut)]
    assert answers[0] == answers[1]
