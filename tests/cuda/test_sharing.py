"""Answers that share steps, on a CUDA device that a CPU stands in for: by programs of several rows,
each answer the one that it would get alone."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kvlite.config.settings import Settings
from kvlite.conversation import run_stats, turn
from kvlite.conversation.metrics import Piece
from kvlite.conversation.runner import Runner
from kvlite.conversation.together import ask_all
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.cuda_graph import GraphDecoder, Replay
from kvlite.engine.step_program import StepProgram
from kvlite.memory.device_budget import spare_bytes
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore
from kvlite.offload.kv.copies import StoreCopies
from kvlite.server import answering
from tests import graph_double
from tests.conftest import make_tiny
from tests.cuda import guard
from tests.served import served
from tests.test_packed import random_ids
from tests.test_speculate import proposing

if not guard.POSSIBLE:
    pytest.skip("needs a torch without CUDA, triton and g++", allow_module_level=True)

from tests.cuda.fake_cuda import FakeCuda, fake_cuda
from tests.cuda.test_on_cuda import SIZES, cuda, forgo_loops, read

__all__ = ["cuda"]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows programs have that answers share, in the order of their recordings; everything
    is read in one slice."""
    made = list[int]()
    forgo_loops(monkeypatch)
    monkeypatch.setattr(run_stats, "SLICE_S", 1e9)

    def captured(program: StepProgram) -> Replay:
        made.append(len(program.rows))
        return graph_double.capture(program)

    monkeypatch.setattr(
        "kvlite.conversation.steps_together.graph_decoder",
        lambda model: GraphDecoder(model, None, captured),
    )
    return made


ASKED: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "h2o", "recall": "off"},
    {"method": "spans", "recall_entries": 6},
    {"method": "h2o", "recall_entries": 6},
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("given", ASKED, ids=str)
def test_questions_together_are_those_of_a_cpu(
    given: dict[str, Any], pins: bool, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the last one is by itself; with recall also where a system pins no copies."""
    recalls = "recall_entries" in given
    text = " ".join(str(3 + 7 * at % 90) for at in range(120))
    settings = Settings(**{"budget": 60, "max_new_tokens": 40, "speculate": "off", **given})

    def answers(model: LoadedModel) -> list[list[int | None]]:
        talk = Runner(model, settings).conversation()
        talk.read_ahead(text)
        said: list[list[int | None]] = [[], [], [], []]
        lengths = [{"max_new_tokens": count} for count in (40, 24, 12, 12)]
        asked = [(f"{text} {5 + number}", own) for number, own in enumerate(lengths)]
        for index, piece in ask_all([(talk, talk.config, asked)], Callbacks()):
            assert isinstance(piece, Piece), piece
            said[index].append(piece.token_id)
        return said

    expected = answers(make_tiny("llama", **SIZES).model)
    rows.clear()
    with fake_cuda():
        if not pins:
            monkeypatch.setattr(StoreCopies, "copy", without_pins(StoreCopies.copy))
        assert answers(make_tiny("llama", "cuda", **SIZES).model) == expected
    assert rows == ([4, 2] if pins or not recalls else [])


def without_pins(copy: Callable[[StoreCopies], HostKVStore]) -> Callable[..., HostKVStore]:
    """Copies of a store, where nothing more can be pinned meanwhile."""

    def made(copies: StoreCopies) -> HostKVStore:
        with mock.patch("kvlite.offload.kv.transfer.register", lambda *_: False):
            return copy(copies)

    return made


def test_a_copy_of_a_store_takes_what_it_says(cuda: FakeCuda) -> None:
    """In pinned memory, of its own."""
    reading = read(make_tiny("llama", "cuda", **SIZES).model, "spans", recall=16)
    assert reading.recall is not None
    store = reading.recall.store
    copies = StoreCopies(store, 20)
    one, other = copies.copy(), copies.copy()
    assert copies.own_bytes == one.nbytes
    layers = [each.layers[0].head_group.residual_keys for each in (store, one, other)]
    assert len({keys.data_ptr() for keys in layers}) == 3
    assert all(
        keys.is_pinned() and keys[:, :, :160].equal(layers[0][:, :, :160]) for keys in layers
    )
    assert layers[1].shape[2] == 180 and one.layers[0].index is not store.layers[0].index


def test_what_recordings_hold_is_not_free(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch counts as unused is, but for their replays."""
    names = ("device", "total_size", "allocated_size", "segment_pool_id")
    parts = [(0, 8 << 30, 1 << 30, (0, 0)), (0, 3 << 30, 1 << 30, (0, 1)), (1, 2 << 30, 0, (0, 1))]
    held = [dict(zip(names, part, strict=True)) for part in parts]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: held)
    one, two = (torch.device("cuda", number) for number in range(2))
    assert spare_bytes([one]) == int(0.98 * (21 << 30))
    assert spare_bytes([one, two]) == int(0.98 * 2 * (21 << 30))


@pytest.mark.cases(3)
@pytest.mark.parametrize("counts", [(14, 10), (14, 12, 10, 8)], ids=len)
@pytest.mark.parametrize("given", ASKED[::-1], ids=str)
def test_requests_together_are_those_of_each_alone(
    given: dict[str, Any],
    counts: tuple[int, ...],
    rows: list[int],
    cuda: FakeCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as the device has memory for, as planned: none while it has nothing free."""
    monkeypatch.setattr(turn, "PLANNED_FROM", 0)
    settings = Settings(**{"budget": 60, "speculate": "off", **given})
    runner = Runner(make_tiny("llama", "cuda", **SIZES).model, settings)

    def answers() -> list[list[int | None]]:
        asked = [
            (random_ids(120, at)[0].tolist(), {"max_new_tokens": count})
            for at, count in enumerate(counts)
        ]
        return [each.tokens for each in served(runner, tmp_path, asked)]

    together = answers()
    assert max(rows) == len(counts) and [*map(len, together)] == [*counts]
    rows.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1000, 24 << 30))
    assert answers() == together and not rows
    monkeypatch.setattr(answering, "MOST", 1)
    assert answers() == together


@pytest.mark.cases(2)
@pytest.mark.parametrize("given", [{}, {"kv_bits": "4"}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_recall_goes_on_in_programs_behind_rejected_tokens(
    given: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's replays, and passes of tokens that were proposed, in turns in one answer."""
    forgo_loops(monkeypatch)
    monkeypatch.setattr(
        "kvlite.conversation.turn.graph_decoder",
        lambda model, sampler: GraphDecoder(model, sampler, graph_double.capture),
    )
    settings = Settings(**{"budget": 60, "recall_entries": 6, "max_new_tokens": 40, **given})
    ids, draw = random_ids(130, 1)[0].tolist(), random.Random(seed)

    def proposed(tokens: list[int], count: int) -> list[int]:
        right = [*ids, *plain.token_ids][len(tokens) :][: draw.randrange(3)]
        return draw.choice([[], [], [*right, 9, 9, 9]])

    with fake_cuda():
        model = make_tiny("llama", "cuda", **SIZES).model
        single = Runner(model, settings).conversation()
        plain = single.generate(ids, ignore_eos=True)
        with proposing(proposed):
            talk = Runner(model, settings.replace({"speculate": "auto"})).conversation()
            said = talk.generate(ids, ignore_eos=True)
        held = [
            [group.positions[:, :, : group.used].sort().values.tolist() for group in groups]
            for each in (single, talk)
            for groups in [[layer.head_groups[0] for layer in each.cache.layers]]
        ]
    assert said.token_ids == plain.token_ids and held[0] == held[1]
    assert said.metrics.proposed_tokens > said.metrics.accepted_tokens > 0
    assert said.metrics.graph_steps
