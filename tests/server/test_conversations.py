"""Which conversation a request goes on with, and which stay."""

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvlite
from kvlite.config.settings import Settings
from kvlite.conversation.library import Library
from kvlite.conversation.runner import Runner
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.errors import ContextError, OutOfMemory, SettingError
from kvlite.server import conversations, kept
from kvlite.server.conversations import Conversations
from tests.conftest import Tiny

GIVEN: dict[str, Any] = {"max_new_tokens": 4, "budget": "60"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "SHORT", 100)
    monkeypatch.setattr(conversations, "SHORT_ONES", 3)


def ids_of(count: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(3, 199) for _ in range(count)]


@pytest.fixture
def pool(llama: Tiny, tmp_path: Path) -> Conversations:
    runner = Runner(llama.model, Settings().replace(GIVEN))
    return Conversations(runner, 1 << 30, 1 << 30, Library(root=tmp_path))


def files_in(root: Path) -> list[Path]:
    return sorted(root.glob("library/*/whole.kv"))


def pool_in(root: Path, runner: Runner) -> Conversations:
    return Conversations(runner, 1 << 30, 1 << 30, Library(root=root))


class Asked:
    """One request's answer, and what it read."""

    def __init__(self, pool: Conversations, ids: list[int], **given: Any) -> None:
        heard = pool.answer(ids, given, NO_CALLBACKS, ignore_eos=True)
        pieces = [piece for piece, _ in heard if piece is not None]
        self.ids = [*ids, *(each.token_id for each in pieces if each.token_id is not None)]
        self.answer, metrics = self.ids[len(ids) :], pieces[-1].metrics
        self.read = metrics.ahead_tokens + metrics.prompt_tokens


def test_two_documents_in_turns_are_read_once_each(pool: Conversations) -> None:
    first, second = Asked(pool, ids_of(300, 0)), Asked(pool, ids_of(300, 1))
    for number in range(3):
        first = Asked(pool, [*first.ids, *ids_of(80, 2 + number)])
        second = Asked(pool, [*second.ids, *ids_of(80, 9 + number)])
        assert first.read <= 81 and second.read <= 81
    assert len(pool.kept) == 2


def test_other_settings_are_another_conversation(pool: Conversations) -> None:
    ids = ids_of(300, 0)
    Asked(pool, ids)
    assert Asked(pool, ids, method="snapkv").read == 300
    assert Asked(pool, ids, temperature=0.7, max_new_tokens=2).read == 64
    assert Asked(pool, ids, method="snapkv").read == 64


def test_after_an_error_it_goes_on(pool: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Asked(pool, ids_of(300, 0))
    with pytest.raises(ContextError):
        Asked(pool, [*first.ids, *ids_of(2000, 1)])
    assert Asked(pool, [*first.ids, *ids_of(80, 2)]).read <= 81

    def broken(*args: Any, **given: Any) -> Any:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(conversations, "answer_prompt", broken)
        with pytest.raises(ValueError, match="a bug"):
            Asked(pool, [*first.ids, *ids_of(80, 2)])
    assert not pool.kept  # nobody knows how it is
    with pytest.raises(SettingError):
        Asked(pool, first.ids, method="magic")
    assert not pool.kept
    assert Asked(pool, first.ids).read == len(first.ids)


def test_the_least_recently_used_go_to_disk_and_come_back(
    tiny_folder: Path, tmp_path: Path
) -> None:
    runner = kvlite.load(str(tiny_folder), **GIVEN)
    pool = Conversations(runner, 1 << 30, 1 << 30, Library(root=tmp_path / "files"))
    asked = [Asked(pool, ids_of(300, each)) for each in range(3)]
    one = pool.kept[0].memory_bytes
    pool.keep = 2 * one + one // 2
    asked.append(Asked(pool, ids_of(300, 3)))
    assert [each.talk is None for each in pool.kept] == [True, True, False, False]
    files = files_in(tmp_path / "files")
    assert len(files) == 2 and files[0].stat().st_mode & 0o077 == 0
    fresh = Conversations(runner, 0, 0, Library(root=tmp_path))
    ids = [*asked[0].ids, *ids_of(80, 9)]
    again = Asked(pool, ids)
    assert again.read <= 81 and again.answer == Asked(fresh, ids).answer
    pool.files.most = one + one // 2
    Asked(pool, ids_of(300, 8))
    held = [each for each in pool.kept if each.talk is None]
    assert len(held) == len(files_in(tmp_path / "files")) == 1
    held[0].path.write_bytes(b"damaged")
    ids = [*held[0].ids, 5]
    assert Asked(pool, ids).read == len(ids)
    pool.set_aside()


def test_what_could_not_be_written_is_tried_again_or_forgotten(
    pool: Conversations, tmp_path: Path
) -> None:
    room, pool.files.most = pool.files.most, 1
    asked = [Asked(pool, ids_of(300, each)) for each in range(2)]
    assert pool.store_idle() and pool.store_idle() and not pool.store_idle()
    assert files_in(tmp_path) == []
    pool.keep = 0
    asked.append(Asked(pool, ids_of(300, 2)))
    assert len(pool.kept) == 1  # the others are nowhere
    assert pool.store_idle()
    pool.files.most = room
    Asked(pool, ids_of(300, 3))
    assert Asked(pool, [*asked[2].ids, *ids_of(80, 4)]).read <= 81


class Device:
    """Memory of a device, as `pool` finds it: what its conversations do not take is free; and what
    the next turn is planned to take."""

    def __init__(self, pool: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool, self.size, self.wanted = pool, 0, 0
        monkeypatch.setattr(conversations, "spare_bytes", lambda devices: self.free)
        monkeypatch.setattr("kvlite.conversation.turn.wanted_bytes", lambda turn: self.wanted)

    @property
    def free(self) -> int:
        return self.size - sum(each.device_bytes for each in self.pool.kept)


def test_as_many_leave_memory_as_the_next_turn_takes_the_least_recently_used_first(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_in(tmp_path, kvlite.load(str(tiny_folder), **GIVEN))
    device = Device(pool, monkeypatch)
    device.size = 1 << 30
    asked = [Asked(pool, ids_of(count, seed)) for seed, count in enumerate((300, 20, 300, 300))]
    asked[0] = Asked(pool, [*asked[0].ids, *ids_of(80, 9)])  # the last used now
    taken = sum(each.device_bytes for each in pool.kept)
    one = max(each.device_bytes for each in pool.kept)
    device.size, device.wanted = taken + one, one
    asked.append(Asked(pool, ids_of(300, 8)))
    assert all(each.talk is not None for each in pool.kept) and len(pool.kept) == 5
    device.size = sum(each.device_bytes for each in pool.kept)
    device.wanted = one + 1  # the short one's is not enough, and one more's is
    Asked(pool, [*asked[4].ids, *ids_of(80, 5)])
    assert [(len(each.ids) // 300, each.talk is None) for each in pool.kept] == [
        (1, False),
        (1, True),
        (1, False),
        (1, False),
    ]
    device.wanted = 1 << 40  # which is not there, and nobody else takes it
    ids = [*asked[2].ids, *ids_of(80, 6)]
    again = Asked(pool, ids)
    assert again.read <= 81 and [each.talk is None for each in pool.kept].count(False) == 1
    fresh = Conversations(pool.runner, 0, 0, Library(root=tmp_path / "fresh"))
    assert again.answer == Asked(fresh, ids).answer


def test_beside_others_a_turn_for_which_there_is_no_room_waits(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as if it had not been asked, and then takes what they leave."""
    pool = pool_in(tmp_path, kvlite.load(str(tiny_folder), **GIVEN))
    device, lacks = Device(pool, monkeypatch), list[int]()
    first = Asked(pool, ids_of(300, 0))
    going = pool.answer(ids_of(300, 1), {}, NO_CALLBACKS, ignore_eos=True)
    next(piece for piece, _ in going if piece is not None)
    device.size, device.wanted = sum(each.device_bytes for each in pool.kept), 10**6
    ids = [*first.ids, *ids_of(80, 2)]
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="no room beside"):
            list(pool.answer(ids, {}, replace(NO_CALLBACKS, planned=lacks.append)))
    assert lacks == [10**6] * 2 and [each.busy for each in pool.kept] == [False, True]
    assert len(list(going)) == 3
    assert Asked(pool, ids).read <= 81
    assert [each.talk is None for each in pool.kept] == [False, True]


def test_a_disk_that_fails_fails_no_answer(
    pool: Conversations,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As read-only and full disks do, and links to nowhere."""
    pool.keep = 1
    gone = pool.files.library.new()
    pool.files.library.save(gone)
    pool.files.library.whole(gone.id).symlink_to(tmp_path / "nowhere")
    first, second = Asked(pool, ids_of(300, 0)), Asked(pool, ids_of(300, 1))
    assert [each.path is not None for each in pool.kept] == [True, False]

    def fails(*args: Any, **given: Any) -> Any:
        raise OSError(30, "Read-only file system")

    save = kvlite.Conversation.save

    # Servers of other tests may be storing what they keep meanwhile.
    def save_here(talk: kvlite.Conversation, *args: Any, **given: Any) -> Any:
        here = any(each.talk is talk for each in pool.kept)
        return fails() if here else save(talk, *args, **given)

    monkeypatch.setattr(pool.files.library, "remove", fails)
    monkeypatch.setattr(kvlite.Conversation, "save", save_here)
    for number in range(3):
        first = Asked(pool, [*first.ids, *ids_of(20, 10 + number)])
        second = Asked(pool, [*second.ids, *ids_of(20, 20 + number)])
        assert not any(each.busy for each in pool.kept)
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 2
    monkeypatch.setattr(pool, "_keep_within", fails)
    assert Asked(pool, [*second.ids, *ids_of(20, 30)]).read <= 64


def test_what_cannot_be_opened_for_want_of_memory_stays_on_disk(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others take it; those who are idle leave it."""
    pool = pool_in(tmp_path, kvlite.load(str(tiny_folder), **GIVEN))
    first = Asked(pool, ids_of(300, 0))
    pool.set_aside()
    device, opens = Device(pool, monkeypatch), kvlite.Runner.open

    def runs_out(runner: Runner, path: Path) -> kvlite.Conversation:
        if device.free < 1:
            raise OutOfMemory("there is no room for it")
        return opens(runner, path)

    monkeypatch.setattr(kvlite.Runner, "open", runs_out)
    going = pool.answer(ids_of(300, 1), {}, NO_CALLBACKS, ignore_eos=True)
    next(piece for piece, _ in going if piece is not None)
    ids = [*first.ids, *ids_of(80, 2)]
    with pytest.raises(OutOfMemory):
        Asked(pool, ids)
    assert pool.kept[0].path is not None and len(list(going)) == 3
    device.size = 1 + pool.kept[1].device_bytes // 2
    assert Asked(pool, ids).read <= 81
    assert [each.talk is None for each in pool.kept] == [False, True]


@pytest.mark.parametrize("place", ["in memory", "on disk"])
@pytest.mark.parametrize("way", ["auto", "60", "8", "kivi4"])
def test_a_beginning_is_shared_and_each_goes_on(
    tiny_folder: Path, tmp_path: Path, way: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subagent with the same system prompt and tools, an edit far back, and the original again:
    each reads what is new to it, and answers as if the first conversation had gone on there."""
    given = {"budget": way} if way in ("auto", "60") else {"kv_bits": way, "recall": "off"}
    runner = kvlite.load(str(tiny_folder), max_new_tokens=4, **given)
    pool, common = pool_in(tmp_path, runner), ids_of(200, 0)
    main = Asked(pool, [*common, *ids_of(300, 1)])
    prompts = {
        "subagent": ([*common, *ids_of(80, 2)], 80),
        "another": ([*common, *ids_of(90, 3)], 90),
        "edited": ([*main.ids[:350], *ids_of(100, 4)], 100),
        "main": ([*main.ids, *ids_of(30, 5)], 31),
    }
    choosing = 64  # the last of what was read is read again where not all of it is kept
    for name, (ids, new) in prompts.items():
        if place == "on disk":
            pool.set_aside()
        asked = Asked(pool, ids)
        most = new if way == "auto" else max(new, choosing) + 63 * (way == "kivi4")
        assert asked.read <= most, name
        alone = Conversations(runner, 0, 0, Library(root=tmp_path / name))
        Asked(alone, main.ids[:500])
        with monkeypatch.context() as patch:
            patch.setattr(kept.Kept, "is_left_by", lambda each, same: False)
            patch.setattr(kept.Kept, "is_gone_on_with", lambda each, same: True)
            assert Asked(alone, ids).answer == asked.answer, name
    assert len(pool.kept) == 4


def test_what_one_writes_behind_a_shared_beginning_is_not_the_others(pool: Conversations) -> None:
    main = Asked(pool, ids_of(400, 0))
    for turn in range(3):
        branch = Asked(pool, [*main.ids[:200], *ids_of(150, 1 + turn)])
        main = Asked(pool, [*main.ids, *ids_of(70, 10 + turn)])
        assert main.read <= 71 and branch.read <= 150
    fresh = Conversations(pool.runner, 0, 0, pool.files.library)
    assert Asked(fresh, main.ids).answer == Asked(pool, main.ids).answer


def test_where_there_is_no_room_for_both_the_original_is_cut_back(
    pool: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = Asked(pool, ids_of(400, 0))
    monkeypatch.setattr(conversations, "spare_bytes", lambda devices: 0)
    assert Asked(pool, [*main.ids[:300], *ids_of(80, 1)]).read <= 81
    assert len(pool.kept) == 1
