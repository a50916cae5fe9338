"""Where the recall store is, how large, and what happens when there is no room for it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from kvlite.engine.callbacks import Callbacks
from kvlite.offload.kv.placement import host_kv_bytes, index_bytes
from kvlite.offload.kv.storage import Disk
from tests.conftest import SIZES, Tiny, make_tiny

from .test_packed import random_ids
from .test_recall import chat, last_logits, logits_of_the_whole

SMALL = {"method": "snapkv:window=8", "budget": 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.cases(4)
@pytest.mark.parametrize("recall", ["auto", "ram", "disk"])
@pytest.mark.parametrize("bits", ["16", "4"])
def test_turns_are_exact_wherever_it_is(llama: Tiny, cache: Path, recall: str, bits: str) -> None:
    talk = chat(llama.model, recall=recall, kv_bits=bits, **SMALL)
    for turn in range(3):
        logits = last_logits(talk, random_ids(120 if turn == 0 else 30, turn)[0].tolist())
        upto = talk.token_ids[: len(talk.token_ids) - 8]
        torch.testing.assert_close(logits, logits_of_the_whole(llama, upto), atol=1e-4, rtol=1e-4)
    assert talk.store is not None and talk.store.on_disk == (recall == "disk")
    assert all((layer.disk is None) == (recall != "disk") for layer in talk.store.layers)


def test_storage_on_disk_takes_no_memory_and_leaves_no_file(llama: Tiny, cache: Path) -> None:
    talk = chat(llama.model, recall="disk", **SMALL)
    answer = talk.generate(random_ids(300)[0].tolist(), ignore_eos=True)
    assert talk.store is not None and answer.metrics.host_kv_place == "disk"
    layer = talk.store.layers[0].cache
    maps = Path("/proc/self/maps").read_text().splitlines()
    for tensor in layer.tensors:
        (line,) = (each for each in maps if _holds(each, tensor.untyped_storage().data_ptr()))
        assert str(cache / "recall") in line and "(deleted)" in line
    assert list((cache / "recall").iterdir()) == []
    assert f"from {answer.metrics.host_kv_bytes / 1024:.1f} KiB on disk" in answer.metrics.line()


def _holds(line: str, address: int) -> bool:
    low, high = (int(each, 16) for each in line.split()[0].split("-"))
    return low <= address < high


def test_auto_goes_to_disk_where_memory_is_short_and_says_so(
    llama: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(llama.model, recall="auto", recall_limit="200KiB", **SMALL)
    said: list[str] = []
    first = talk.generate(random_ids(120)[0].tolist(), callbacks=Callbacks(notify=said.append))
    assert first.metrics.host_kv_place == "ram" and not said
    second = talk.generate(random_ids(300, 2)[0].tolist(), callbacks=Callbacks(notify=said.append))
    assert second.metrics.host_kv_place == "disk" and list(second.metrics.notes) == said
    assert str(cache / "recall") in said[0] and "200.0 KiB" in said[0]
    third = talk.generate([5, 6], recall_limit="auto")
    assert third.metrics.host_kv_place == "disk" and not third.metrics.notes
    logits = last_logits(talk, random_ids(30, 3)[0].tolist())
    upto = talk.token_ids[: len(talk.token_ids) - 8]
    torch.testing.assert_close(logits, logits_of_the_whole(llama, upto), atol=1e-4, rtol=1e-4)


def test_ram_is_never_exceeded_for_a_disk_nobody_asked_for(llama: Tiny, cache: Path) -> None:
    talk = chat(llama.model, recall="ram", recall_limit="100KiB", **SMALL)
    (note,) = talk.generate(random_ids(300)[0].tolist()).metrics.notes
    assert "may take 100.0 KiB" in note and "--recall disk" in note
    assert talk.store is None and not cache.exists()


@pytest.mark.parametrize("recall", ["disk", "auto"])
def test_a_disk_without_room_is_said_before_anything_is_read(
    llama: Tiny, cache: Path, recall: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    usage = os.statvfs_result((4096, 4096, 9, 3, 3, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    talk = chat(llama.model, recall=recall, **SMALL)
    told: list[str] = []
    ids = random_ids(300)[0].tolist()
    progress = (lambda *_: told.append("read")) if recall == "disk" else None
    answer = talk.generate(ids, callbacks=Callbacks(progress=progress, notify=told.append))
    assert "which has 12.0 KiB free" in told[0] and answer.metrics.notes == (told[0],)
    assert (
        talk.store is None
        and answer.metrics.host_kv_bytes == 0
        and answer.metrics.host_kv_place == ""
    )
    assert answer.metrics.kept_entries_mean < 60


def test_a_folder_that_cannot_be_written_is_said(llama: Tiny, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    talk = chat(llama.model, recall="disk", **SMALL)
    (note,) = talk.generate(random_ids(300)[0].tolist()).metrics.notes
    assert str(cache / "recall") in note and "KVLITE_CACHE" in note


@pytest.mark.cases(3)
@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("method", ["snapkv:window=8", "h2o", "kvzip"])
def test_a_disk_that_fills_up_costs_the_tier_and_nothing_else(
    llama: Tiny, cache: Path, turn: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(llama.model, recall="disk", method=method, budget=40)
    plain = chat(llama.model, recall="off", method=method, budget=40)
    for seed in range(turn):
        talk.generate(random_ids(60, seed)[0].tolist(), ignore_eos=True)
        plain.generate(random_ids(60, seed)[0].tolist(), ignore_eos=True)
    calls, reserve = 0, os.posix_fallocate

    def full(file: int, start: int, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(Disk, "require", lambda self, needed: None)
    (cache / "recall").mkdir(parents=True, exist_ok=True)
    told: list[str] = []
    ids = random_ids(200, 7)[0].tolist()
    answer = talk.generate(ids, ignore_eos=True, callbacks=Callbacks(notify=told.append))
    assert calls == 3 and "No space left" in told[0] and answer.metrics.notes == (told[0],)
    assert talk.store is None and len(answer.token_ids) == 9
    assert talk.cache.seen == len(talk.token_ids) == 208 + 69 * turn
    if not turn:
        assert answer.token_ids == plain.generate(ids, ignore_eos=True).token_ids
    assert len(talk.generate([5, 6], ignore_eos=True).token_ids) == 9


@pytest.mark.parametrize("bits", ["16", "4"])
def test_bytes_are_as_predicted(llama: Tiny, bits: str) -> None:
    talk = chat(llama.model, recall_bits=bits, max_new_tokens=9, **SMALL)
    talk.generate(random_ids(700)[0].tolist(), ignore_eos=True)
    assert talk.store is not None
    shape, own = llama.model.shape, talk.store.bits
    assert talk.store.index_bytes == index_bytes(shape, 709)
    assert talk.store.nbytes == host_kv_bytes(shape, 700, 9, 4, own)


def test_what_was_recalled_is_counted(llama: Tiny) -> None:
    talk = chat(llama.model, recall_entries=20, **SMALL)
    metrics = talk.generate(random_ids(300)[0].tolist(), ignore_eos=True).metrics
    entry = 2 * llama.model.shape.head_dim * 4 + 4
    assert metrics.recalled_bytes % entry == 0
    heads, layers = llama.model.shape.kv_heads, llama.model.shape.layers
    wanted, brought = 8 * layers * heads * 40, metrics.recalled_bytes // entry
    assert 0 < brought < wanted
    assert metrics.recall_hit_rate == pytest.approx(1 - brought / wanted)
    assert "recalled " in metrics.line() and "in RAM" in metrics.line()
    between = talk.generate([5, 6], recall_entries=0, ignore_eos=True).metrics
    assert (between.recalled_bytes, between.recall_hit_rate) == (0, None)
    assert between.again_tokens == 8 and between.line().startswith("read 3 tokens and 8 again")


class Interrupted(BaseException):
    """As if Ctrl-C had come twice."""


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_that_broke_off_costs_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_tiny(name)
    talk = chat(tiny.model, **SMALL)
    pieces = talk.stream_tokens(random_ids(200)[0].tolist(), ignore_eos=True)
    next(pieces), next(pieces)
    through = tiny.model.step_layer
    with monkeypatch.context() as broken:

        def fail(index: int) -> Callable[..., Tensor]:
            def forward(*args: Any, **given: Any) -> Tensor:
                out = through(index)(*args, **given)
                if index == 2:
                    raise Interrupted
                return out

            return forward

        broken.setattr(tiny.model, "step_layer", fail)
        with pytest.raises(Interrupted):
            next(pieces)
    assert talk.cache.writing
    logits = last_logits(talk, random_ids(30, 3)[0].tolist())
    upto = talk.token_ids[: len(talk.token_ids) - 8]
    assert len(upto) == 200 + 2 + 30
    torch.testing.assert_close(logits, logits_of_the_whole(tiny, upto), atol=1e-4, rtol=1e-4)
    assert not talk.cache.writing


@pytest.mark.long
def test_fifty_turns_leave_the_device_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "max_position_embeddings", 8192)
    model = make_tiny("llama").model
    talk = chat(model, method="snapkv:window=8", budget=64)
    held, indexed, kept = [], [], []
    for turn in range(50):
        metrics = talk.generate(random_ids(90, turn)[0].tolist(), ignore_eos=True).metrics
        assert metrics.seen_tokens == 99 * turn + 98
        read = metrics.seen_tokens - 8
        held.append(metrics.kv_bytes)
        indexed.append(metrics.index_bytes / index_bytes(model.shape, read + 9))
        kept.append(metrics.host_kv_bytes / host_kv_bytes(model.shape, read, 9, 4, None))
    assert max(held) <= 1.01 * min(held)
    # What grows has room for an eighth more than it was found to need.
    assert indexed[0] == kept[0] == 1 and all(1 <= each <= 1.126 for each in indexed + kept)


@pytest.mark.parametrize("method", ["snapkv:window=8", "pyramidinfer:least=8"])
@pytest.mark.parametrize("room", [True, False])
def test_nothing_is_read_ahead_that_would_be_lost(
    llama: Tiny, cache: Path, method: str, room: bool
) -> None:
    recall = {"recall": "ram", "recall_limit": "auto" if room else "1KB"}
    talk = chat(llama.model, method=method, budget=40, **recall)
    text = " ".join(map(str, random_ids(150)[0].tolist()))
    told: list[str] = []
    exact = method.startswith("snapkv")
    assert talk.read_ahead(text, callbacks=Callbacks(notify=told.append)) == (room and exact)
    assert bool(talk.token_ids) == (room and exact) and not told
    pieces = list(talk.stream(f"{text} 5 6 7", callbacks=Callbacks(notify=told.append)))
    assert pieces[0].metrics.notes == tuple(told) and bool(told) != room
    assert len(talk.token_ids) == 153 + len(pieces) - 1


def test_what_was_noted_while_reading_ahead_is_in_the_answers_ledger(
    llama: Tiny, cache: Path
) -> None:
    talk = chat(llama.model, recall="auto", recall_limit="1KB", **SMALL)
    text, told = " ".join(map(str, random_ids(150)[0].tolist())), list[str]()
    assert (
        talk.read_ahead(text, callbacks=Callbacks(notify=told.append))
        and "temporary file" in told[0]
    )
    first = list(talk.stream(f"{text} 5 6 7", callbacks=Callbacks(notify=told.append)))[-1].metrics
    assert first.notes == tuple(told) and len(told) == 1
    assert talk.generate([5, 6]).metrics.notes == ()


def test_a_limit_is_kept_to_the_byte(llama: Tiny) -> None:
    shape = llama.model.shape
    limit = host_kv_bytes(shape, 179, 9, 4, None)
    talk = chat(llama.model, recall="ram", recall_limit=f"{limit}B", **SMALL)
    for count in (150, 20):
        metrics = talk.generate(random_ids(count)[0].tolist(), ignore_eos=True).metrics
        assert 0 < metrics.host_kv_bytes <= limit and not metrics.notes
