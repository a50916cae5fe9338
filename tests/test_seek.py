"""Odd ways back in a conversation: settings that change, memory that ends, copies that add up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvlite
from kvlite.cache import LayerCache
from kvlite.cache.copying import copied
from kvlite.config.settings import Settings
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.conversation import Conversation
from kvlite.errors import OutOfMemory, SettingError
from kvlite.offload.kv.checkpoint import HostKVCheckpoint
from tests.conftest import Tiny, make_tiny
from tests.contract.talks import (
    FIRST,
    GIVEN,
    OTHER,
    SECOND,
    SMALL,
    THIRD,
    WORDS,
    entries,
    heard,
    opened,
    said,
)
from tests.faults import Faults


def alike(one: Conversation, two: Conversation) -> None:
    """Both hold as many entries of as many tokens, and go on alike."""
    assert one.cache.seen == len(one.token_ids) and one.messages == two.messages
    assert [*map(len, entries(one))] == [*map(len, entries(two))]
    assert one.cache.entries_mean == two.cache.entries_mean
    assert said(one, WORDS[5]) == said(two, WORDS[5])


@pytest.mark.parametrize("given", [{"recall": "off"}, {"recall_bits": "4"}])
def test_a_checkpoint_that_could_not_be_kept_is_not_believed(
    llama: Tiny, given: dict[str, Any]
) -> None:
    talk = opened(llama, budget="40", checkpoint_limit="0MB", **given)
    said(talk, FIRST, SECOND)
    list(talk.edit(2, OTHER))
    list(talk.edit(2, WORDS[0]))
    assert talk.cache.entries_mean >= 40 and not talk.context.checkpoint_bytes


def test_a_copy_of_one_branch_and_marks_of_another(llama: Tiny) -> None:
    short, long, longer = (" ".join(str(3 + i) for i in range(n)) for n in (20, 40, 90))
    given = {"budget": "110", "recall": "off"}
    talk, fresh = opened(llama, **given), opened(llama, **given)
    said(talk, short, long, longer)
    list(talk.edit(2, WORDS[0]))
    talk.switch(0)
    list(talk.edit(3, WORDS[0]))
    talk.switch(1)
    said(fresh, short, WORDS[0])
    alike(talk, fresh)


@pytest.mark.parametrize(
    "given", [{"recall": "off", "budget": "1000"}, {"recall": "ram", "recall_limit": "1KB"}]
)
def test_without_the_tier_all_of_it_is_in_the_cache(llama: Tiny, given: dict[str, str]) -> None:
    """After going back only the host store has what was read, but for the last answer."""
    talk = opened(llama, budget="40")
    said(talk, FIRST, SECOND)
    talk.undo()
    before = [*talk.token_ids, *talk.context.pending_ids]
    heard(talk.stream(OTHER, **given))
    assert talk.token_ids[: len(before)] == before and talk.cache.seen == len(talk.token_ids)
    if given["recall"] == "off":
        assert talk.cache.entries_mean == talk.cache.seen
        first = entries(talk)[0][0][0]
        assert first.tolist() == [*range(talk.cache.seen)]
    assert talk.cache.entries_mean >= 40


def test_bits_of_the_tier_that_change(llama: Tiny, tmp_path: Path) -> None:
    talk, fresh = (opened(llama, budget="40", recall_bits=bits) for bits in ("4", "16"))
    for text in (FIRST, SECOND):
        heard(talk.stream(text, recall_bits="16"))
    heard(talk.stream(THIRD))
    talk.save(tmp_path / "talk.kv")
    again = kvlite.Runner(llama.model, Settings()).open(tmp_path / "talk.kv")
    said(fresh, FIRST)
    expected = said(fresh, OTHER)[0]
    for each in (again, talk):
        assert heard(each.edit(2, OTHER, recall_bits="16")) == expected


@pytest.mark.long
@pytest.mark.parametrize("given", [{"recall": "off"}, {}, {"recall_bits": "4"}])
def test_memory_that_ends_while_going_back(llama: Tiny, given: dict[str, str]) -> None:
    """Wherever it does: what is said next is answered as if nothing had happened."""
    for at in range(0, 400, 47):
        talk, fresh = (opened(llama, budget="40", never_lossy=True, **given) for _ in range(2))
        said(talk, FIRST, SECOND, THIRD)
        list(talk.edit(3, OTHER))
        try:
            with Faults(range(at, at + 3)):
                talk.switch(0)
        except OutOfMemory:
            pass
        assert talk.cache.seen == len(talk.token_ids)
        texts = [message["content"] for message in talk.messages if message["role"] == "user"]
        said(fresh, *texts)
        assert talk.messages == fresh.messages
        assert said(talk, WORDS[5]) == said(fresh, WORDS[5])


def test_copies_do_not_add_up(llama: Tiny) -> None:
    talk = opened(llama, budget="40", recall="off")
    said(talk, FIRST)
    sizes = set()
    for _ in range(4):
        said(talk, SECOND)
        talk.undo()
        sizes.add((talk.context.checkpoint_bytes, len(talk.context.checkpoints)))
    assert len(sizes) == 1
    list(talk.edit(1, FIRST))
    sizes = set()
    for turn in range(6):
        talk.switch(turn % 2)
        sizes.add((talk.context.checkpoint_bytes, len(talk.context.checkpoints)))
    assert len(sizes) <= 2


def test_what_is_refused_makes_no_room() -> None:
    tiny = make_tiny("llama", **SMALL)
    talk = opened(tiny, budget="40", beyond_context="compact")
    said(talk, FIRST, FIRST)
    seen = talk.cache.seen
    with pytest.raises(SettingError, match="not in this model's vocabulary"):
        talk.generate([5000] * 100)
    assert talk.cache.seen == seen and talk.undo() == FIRST


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of what is copied for checkpoints, at a time."""
    made: list[int] = []

    def counted(layers: Sequence[LayerCache], devices: Sequence[torch.device]) -> list[LayerCache]:
        held = {t.untyped_storage().data_ptr(): t for layer in layers for t in layer.tensors}
        made.append(sum(each.untyped_storage().nbytes() for each in held.values()))
        return copied(layers, devices)

    monkeypatch.setattr("kvlite.conversation.checkpoint.copied", counted)
    return made


@pytest.mark.cases(3, 12)
@pytest.mark.parametrize("limit", ["auto", "60KB", "0MB"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("name", ["recall", "forget", "late, forgotten"])
def test_nothing_is_copied_that_could_not_be_kept(
    architecture: str, name: str, limit: str, copies: list[int]
) -> None:
    talk = opened(make_tiny(architecture), **GIVEN[name], checkpoint_limit=limit)
    said(talk, FIRST, SECOND, THIRD)
    most = talk.config.checkpoint_bytes
    assert max(copies, default=0) <= most and talk.context.checkpoint_bytes <= most
    assert sum(copies) > 0 or limit != "auto"


def made_by(talk: Conversation) -> list[Checkpoint]:
    """Checkpoints before its messages."""
    return [each.start for each in talk.history.branch.nodes]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("bits", ["16", "4"])
def test_a_mark_that_takes_too_much_is_not_held(architecture: str, bits: str) -> None:
    tiny, given = make_tiny(architecture), {"budget": "40", "recall_bits": bits}
    talk = opened(tiny, **given)
    said(talk, FIRST, SECOND)
    store = talk.store
    assert store is not None
    taken = HostKVCheckpoint(store).nbytes
    assert (taken > 0) == (bits == "4" or architecture == "gemma3")
    # Where it may not be taken, the message is gone back to by reading again.
    talk = opened(tiny, checkpoint_limit="0MB", **given)
    said(talk, FIRST, SECOND)
    assert made_by(talk)[1].lost == (taken > 0)
    assert talk.undo() == SECOND and not talk.context.checkpoint_bytes
