"""Conversations that take their steps together say what each would say alone."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVBits, KVCache
from kvlite.engine import compiled_rows
from kvlite.engine.layer_step import LayerStep
from kvlite.engine.prefill import prefill
from kvlite.engine.step import StepRows, step
from kvlite.errors import OutOfMemory
from kvlite.memory.oom import OOMPolicy
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import LayerPolicy, layer_policies
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore, Recall
from kvlite.ops import numba_rows
from tests.conftest import make_tiny
from tests.faults import Faults

STEPS = 5


@dataclass(frozen=True)
class Way:
    """How a conversation holds what it read."""

    method: str = "full"
    budget: int = 24
    bits: int | None = None
    recalls: bool = False
    stored_bits: int | None = None


WAYS = [
    Way(),
    Way("spans", 48, recalls=True),
    Way("snapkv:window=8", recalls=True),
    Way("snapkv:per_head=true,window=8"),
    Way("h2o"),
    Way("streaming"),
    Way("spans", 80, bits=4, recalls=True),
    Way("spans", 80, bits=8, recalls=True, stored_bits=2),
    Way("spans", recalls=True, stored_bits=4),
    Way("full", bits=8),
    Way("minference"),
]


@dataclass
class Talk:
    """A conversation that was read."""

    cache: KVCache
    policies: list[LayerPolicy]
    logits: Tensor
    store: HostKVStore | None

    @classmethod
    def read(cls, model: LoadedModel, way: Way, length: int) -> "Talk":
        ids = torch.tensor([[3 + (7 * i * i + length) % 90 for i in range(length)]])
        bits, stored = (each and KVBits(each, each) for each in (way.bits, way.stored_bits))
        cache, method = model.empty_cache(), parse_method(way.method)
        policies = layer_policies(method, model.shape, way.budget, length, bits=bits)
        store = HostKVStore.empty(model.shape, model.dtype, stored) if way.recalls else None
        logits = prefill(model, cache, ids, policies, store=store, reserve=STEPS)
        return cls(cache, policies, logits, store)

    def rows(self, model: LoadedModel, oom_policy: OOMPolicy | None = None) -> StepRows:
        recall = None if self.store is None else Recall(self.store, 8)
        token = self.logits.argmax(-1)
        return StepRows(model, self.cache, token[None], self.policies, recall, oom_policy)


def one_step(rows: StepRows) -> Tensor:
    """The logits of a step by itself."""
    (logits,) = step(rows.model, [rows])
    assert isinstance(logits, Tensor)
    return logits


def alone(model: LoadedModel, talk: Talk, compiled: bool = False) -> list[Tensor]:
    """The logits of each of some steps, without what is compiled for several unless that is
    said."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(compiled_rows, "takes", lambda *_: False)
        for _ in range(STEPS):
            talk.logits = one_step(talk.rows(model))
            made.append(talk.logits)
    return made


def read_all(model: LoadedModel, ways: list[Way]) -> list[Talk]:
    """Of different lengths."""
    return [Talk.read(model, way, 50 + 13 * at) for at, way in enumerate(ways)]


def together(model: LoadedModel, talks: list[Talk], joins: list[int]) -> list[list[Tensor]]:
    """The logits of each of some steps, of each conversation; each joins after some steps of the
    others and leaves when it has taken its own."""
    made: list[list[Tensor]] = [[] for _ in talks]
    for now in range(max(joins) + STEPS):
        going = [at for at, start in enumerate(joins) if start <= now < start + STEPS]
        steps = [talks[at].rows(model) for at in going]
        for at, logits in zip(going, step(model, steps), strict=True):
            assert isinstance(logits, Tensor)
            talks[at].logits = logits
            made[at].append(logits)
    return made


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.cat(one), torch.cat(other), rtol=1e-5, atol=1e-5)
        assert torch.equal(torch.cat(one).argmax(-1), torch.cat(other).argmax(-1))


@pytest.fixture(scope="module")
def few() -> LoadedModel:
    return make_tiny("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48).model


def steps_of(model: LoadedModel, talks: list[Talk]) -> list[StepRows]:
    return [talk.rows(model, OOMPolicy(model.device, never_lossy=True)) for talk in talks]


def test_memory_that_runs_out_once_changes_nothing(few: LoadedModel) -> None:
    """At whatever allocation of a step."""
    read = read_all(few, WAYS[:6])
    few.step_layer(0)  # compared once with the layer as it is
    steps = steps_of(few, deepcopy(read))
    with Faults() as faults:
        expected = step(few, steps)
    for at in range(0, faults.count, faults.count // 16):
        steps = steps_of(few, deepcopy(read))
        with Faults([at]) as fault:
            made = step(few, steps)
        assert fault.failed == 1
        for ours, theirs in zip(made, expected, strict=True):
            assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert [rows.cache.seen for rows in steps] == [talk.cache.seen + 1 for talk in read]


def test_threads_change_no_bit(few: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many share the heads of those that hold, fetch and quantize their entries."""
    read, found = read_all(few, WAYS), []
    monkeypatch.setattr(numba_rows, "WORTH", 0)
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        talks, made = deepcopy(read), []
        for _ in range(3):
            logits = step(few, [talk.rows(few) for talk in talks])
            assert all(isinstance(each, Tensor) for each in logits)
            for talk, each in zip(talks, logits, strict=True):
                talk.logits = each
            made += logits
        found.append(torch.cat(made))
    assert found[0].equal(found[1]) and found[0].equal(found[2])


@pytest.mark.parametrize("interrupted", [(compiled_rows, "attend"), (numba_rows, "attend")])
def test_what_one_call_did_counts_once(
    few: LoadedModel, interrupted: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory runs out behind it, or within once entries were written and fetched."""
    read, taken = read_all(few, [WAYS[0], WAYS[1], Way("snapkv:window=8", 48, recalls=True)]), []
    expected = [one_step(talk.rows(few)) for talk in deepcopy(read)]
    attend = getattr(*interrupted)

    def runs_out(*args: Any) -> Any:
        found = attend(*args)
        if len(args[0]) == 1:  # by itself
            return found
        taken.append(found)
        raise torch.OutOfMemoryError("there is no more")

    monkeypatch.setattr(*interrupted, runs_out)
    made = step(few, steps_of(few, read))
    assert len(taken) == 1
    same([[each] for each in made], [[each] for each in expected])  # type: ignore[list-item]
    stores = [talk.store for talk in read if talk.store is not None]
    assert [each.layers[1].head_group.used for each in stores] == [64, 77]


@pytest.mark.parametrize("layer", [0, 1])
def test_one_that_stops_leaves_the_others_going(
    few: LoadedModel, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_all(few, WAYS[2:5])
    expected = [one_step(talk.rows(few)) for talk in deepcopy(read)]
    short, attend = read[1].cache.seen, LayerStep.attend

    def runs_out(self: LayerStep, *args: Any) -> Tensor:
        if self.position == short and self.index == layer:
            raise torch.OutOfMemoryError("there is no more")
        return attend(self, *args)

    steps = steps_of(few, read)
    with monkeypatch.context() as patch:
        patch.setattr(LayerStep, "attend", runs_out)
        patch.setattr(compiled_rows, "plain", lambda *_: [])
        first, stopped, last = step(few, steps)
    assert isinstance(stopped, OutOfMemory) and read[1].cache.seen == short
    same([[first], [last]], [[expected[0]], [expected[2]]])  # type: ignore[list-item]
    same([[one_step(steps[1])]], [[expected[1]]])  # later it goes on
    assert [talk.cache.seen for talk in read] == [51, 64, 77]
