"""Steps through all layers of packed weights in one compiled call, against one layer at a time."""

import random
import sys
from contextlib import suppress
from copy import deepcopy
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlite.cache.query_log import QueryLog
from kvlite.engine import compiled_step
from kvlite.engine.step import step
from kvlite.model.load import LoadedModel
from kvlite.model.packing import pack_linears

from .conftest import make_tiny
from .test_batch import WAYS, Talk, Way, alone, one_step, read_all, same, together
from .test_speculate import IDS, alike, opened, partly, proposing

if find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from kvlite.ops import numba_step


def packed(name: str) -> LoadedModel:
    model = make_tiny(name, hidden_size=64, intermediate_size=96).model
    pack_linears(model.module.model.layers, torch.float32)
    return model


def held(talks: list[Talk]) -> list[Any]:
    """What conversations hold after their steps, and what went to their stores."""
    groups = [
        [layer.head_groups[0] for layer in layers]
        for talk in talks
        for layers in (talk.cache.layers, *([] if talk.store is None else [_of_store(talk)]))
    ]
    return [
        (each.used, sorted(each.positions[0, 0, : each.used].tolist()))
        for row in groups
        for each in row
    ]


def _of_store(talk: Talk) -> Any:
    assert talk.store is not None
    return [layer.cache for layer in talk.store.layers]


# Norms of heads, biases, and layers whose queries are not turned.
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3"])
def test_as_one_layer_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to hold entries, alone and together; of those that take more than is compiled each
    layer goes through by itself."""
    model, ways = packed(name), WAYS if name == "llama" else WAYS[:3]
    theirs, mine = read_all(model, ways), read_all(model, ways)
    with monkeypatch.context() as patch:
        patch.setattr(compiled_step, "through_layers", lambda *given: given[-2:])
        expected = [alone(model, talk) for talk in theirs]
    calls: list[int] = []
    through = numba_step.through

    def counted(layers: Any, *given: Any) -> Any:
        calls.append(len(layers))
        return through(layers, *given)

    monkeypatch.setattr(numba_step, "through", counted)
    same([alone(model, talk, compiled=True) for talk in mine], expected)
    assert held(mine) == held(theirs)
    assert sum(calls) >= 3 * len(expected[0]) * len(model.layers)
    assert max(calls) == (1 if name == "smollm3" else len(model.layers))
    calls.clear()
    plain, joins = ways[:3], [0, 2, 1]
    same(together(model, read_all(model, plain), joins), expected[:3])
    assert calls


def test_only_layers_that_are_watched_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the sources of an answer."""
    model = packed("llama")
    (expected,), (talk,) = read_all(model, WAYS[:1]), read_all(model, WAYS[:1])
    log, calls, seen = QueryLog(), list[int](), talk.cache.seen
    talk.cache.queries = {1: log}
    through = numba_step.through

    def counted(layers: Any, *given: Any) -> Any:
        calls.append(len(layers))
        return through(layers, *given)

    plain = alone(model, expected, compiled=True)
    monkeypatch.setattr(numba_step, "through", counted)
    same([alone(model, talk, compiled=True)], [plain])
    assert held([talk]) == held([expected])
    assert len(log.of(range(seen, talk.cache.seen))[0]) == talk.cache.seen - seen > 0
    steps = len(plain)
    assert calls == [1, len(model.layers) - 2] * steps


@pytest.mark.parametrize(
    "given",
    [
        {"method": "full"},
        {"method": "full", "kv_bits": "4"},
        {"budget": "36", "recall_entries": 8},
        {"budget": "48", "recall_entries": 16, "kv_bits": "4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_that_are_proposed_go_through_in_one_call(
    name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = packed(name), {"max_new_tokens": 50, **given}
    monkeypatch.setattr(compiled_step.compiled_rows, "MANY", 1 << 30)
    plain = opened(model, speculate="off", **given)
    answer = plain.generate(IDS, ignore_eos=True)
    calls: list[tuple[int, int]] = []
    through = numba_step.through

    def counted(layers: Any, *given: Any) -> Any:
        calls.append((len(layers), given[-2]))
        return through(layers, *given)

    monkeypatch.setattr(numba_step, "through", counted)
    for seed in range(2):
        talk = opened(model, **given)
        with proposing(partly([*IDS, *answer.token_ids], random.Random(seed))) as widths:
            told = talk.generate(IDS, ignore_eos=True)
        assert told.token_ids == answer.token_ids
        alike(talk, plain)
        wide = [tokens for layers, tokens in calls if tokens > 1 and layers == len(model.layers)]
        assert widths and wide == widths
        calls.clear()


@pytest.mark.parametrize(("threads", "taken"), [(2, True), (64, False)])
def test_a_long_cache_is_torchs_only_where_threads_are_many(
    threads: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed("llama")
    monkeypatch.setattr(compiled_step.compiled_rows, "MANY", 64)
    talk, calls = opened(model, method="full", speculate="off"), list[int]()
    through = numba_step.through

    def counted(layers: Any, *given: Any) -> Any:
        calls.append(len(layers))
        return through(layers, *given)

    monkeypatch.setattr(numba_step, "through", counted)
    talk.read(IDS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    talk.generate([5, 6], max_new_tokens=3, ignore_eos=True)
    assert (len(model.layers) in calls) == taken


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many share the heads of those that hold, fetch and quantize their entries."""
    model, found = packed("llama"), []
    read = read_all(model, WAYS)
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        talks, made = deepcopy(read), []
        for _ in range(3):
            rows = [talk.rows(model) for talk in talks]
            for talk, logits in zip(talks, step(model, rows), strict=True):
                assert isinstance(logits, Tensor)
                talk.logits = logits
                made.append(logits)
        found.append(torch.cat(made))
    assert found[0].equal(found[1]) and found[0].equal(found[2])


@pytest.mark.parametrize("after", [False, True])
def test_what_is_interrupted_can_be_done_again(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, through = packed("llama"), numba_step.through
    read = read_all(model, WAYS[:3])
    expected = [one_step(talk.rows(model)) for talk in deepcopy(read)]

    def stops(*given: Any) -> Any:
        if after:
            through(*given)
        raise KeyboardInterrupt

    rows = [talk.rows(model) for talk in read]
    with monkeypatch.context() as patch:
        patch.setattr(numba_step, "through", stops)
        for each in rows:
            with pytest.raises(KeyboardInterrupt):
                one_step(each)
    same([[one_step(each)] for each in rows], [[each] for each in expected])


def test_a_token_counts_in_all_layers_or_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever line it is interrupted behind the call, it can be done again."""
    model, through = packed("llama"), numba_step.through
    (read,) = read_all(model, [Way("spans", 48, recalls=True)])
    after = deepcopy(read)
    expected = one_step(after.rows(model))
    left = 0

    def lengths(talk: Talk) -> list[int]:
        return [used for used, _ in held([talk])]

    def traced(*given: Any) -> Any:
        made = through(*given)
        sys._getframe(1).f_trace = trace
        sys.settrace(trace)
        return made

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).stem not in ("compiled_step", "compiled_rows"):
            return None
        left -= event == "line"
        if left < 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    for lines in count():
        talk, left = deepcopy(read), lines
        rows = talk.rows(model)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(numba_step, "through", traced)
            try:
                one_step(rows)
                break
            finally:
                sys.settrace(before)
        assert lengths(talk) in (lengths(read), lengths(after))
        assert one_step(rows).equal(expected) and held([talk]) == held([after])
        assert talk.cache.seen == read.cache.seen + 1
    assert lines > 20


def test_layers_that_recall_nothing_take_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a model that recalls, in a call of their own."""
    model, plain = packed("qwen2-sliding"), compiled_step._are_plain
    monkeypatch.setattr(
        compiled_step, "_are_plain", lambda row: row[0].policy.window is not None and plain(row)
    )
    given: dict[str, Any] = {"max_new_tokens": 8, "budget": "12", "recall": "auto"}
    single = opened(model, speculate="off", **given)
    answer = single.generate(IDS[:14], ignore_eos=True)
    empty = np.empty

    def filled(*shape: Any, **kind: Any) -> Any:
        made = empty(*shape, **kind)
        made.fill(99)
        return made

    monkeypatch.setattr(numba_step.np, "empty", filled)
    talk = opened(model, **given)
    with proposing(lambda tokens, count: [9] * count) as widths:
        told = talk.generate(IDS[:14], ignore_eos=True)
    assert widths and told.token_ids == answer.token_ids
    alike(talk, single)
