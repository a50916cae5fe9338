"""Layers that come in turn: the same numbers, in the memory of two, whatever happens meanwhile."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.errors import ModelError
from kvlite.memory.meter import TensorMeter
from kvlite.model.experts import ONE_BY_ONE, experts_of, stacked, take_one_by_one
from kvlite.model.load import LoadedModel
from kvlite.offload.weights.layers import StreamedLayers, off_device
from tests.conftest import Tiny, make_tiny
from tests.faults import Faults
from tests.streamed import (
    Pair,
    expert_bytes,
    layer_bytes,
    pair,
    prompt,
    rest_bytes,
    slot_bytes,
    streamed,
    two_turns,
)


@pytest.fixture
def both(llama: Tiny, tmp_path: Path) -> Pair:
    return pair(llama, tmp_path)


def runner(model: LoadedModel, **settings: Any) -> Runner:
    return Runner(model, Settings().replace({"max_new_tokens": 6, **settings}))


def tokens(model: LoadedModel, ids: list[int], **settings: Any) -> list[int]:
    return runner(model, **settings).generate(ids, ignore_eos=True).token_ids


class Watched:
    """A source that remembers what was asked of it, and fails when told to."""

    def __init__(self, layers: Any) -> None:
        self.source, layers.source = layers.source, self
        self.brought: list[int] = []
        self.came = threading.Semaphore(0)
        self.failing: dict[int, BaseException] = {}

    def bring(self, index: int, memory: Tensor) -> None:
        self.brought.append(index)
        if index in self.failing:
            raise self.failing.pop(index)
        self.source.bring(index, memory)
        self.came.release()


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.cases(3, 20)
@pytest.mark.parametrize("setting", ["disk", "ram"])
def test_every_architecture_gives_the_same_logits(tiny: Tiny, setting: str, tmp_path: Path) -> None:
    """To the last digit, in two turns and their answers; but for Llama 4, all of whose experts
    transformers puts into one product."""
    both, near = (
        pair(tiny, tmp_path, setting),
        1e-5 * (tiny.model.shape.model_type == "llama4_text"),
    )
    for ours, whole in zip(two_turns(both.streamed), two_turns(both.whole), strict=True):
        torch.testing.assert_close(ours, whole, rtol=0, atol=near)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "kvzip:passage=32,window=4", "budget": 40},
        {"method": "simlayerkv+kvx", "budget": 40},
        {"method": "minicache", "budget": 40},
        {"method": "pyramidinfer", "budget": 40},
        {"method": "kvx", "budget": 40, "recall": "ram", "recall_entries": 8},
    ],
    ids=lambda settings: settings["method"],
)
def test_whatever_the_method_two_turns_say_the_same(both: Pair, settings: dict[str, Any]) -> None:
    said = []
    for model in (both.whole, both.streamed):
        talk = runner(model, chunk=32, **settings).conversation()
        said.append(
            [talk.generate(prompt(90, turn), ignore_eos=True).token_ids for turn in range(2)]
        )
    assert said[0] == said[1] and all(map(len, said[0]))


def test_two_conversations_take_turns_within_their_answers(both: Pair) -> None:
    ids = [prompt(50, seed) for seed in (1, 2)]
    alone = [tokens(both.whole, each) for each in ids]
    talks = [runner(both.streamed).conversation() for _ in ids]
    streams = [
        talk.stream_tokens(each, ignore_eos=True) for talk, each in zip(talks, ids, strict=True)
    ]
    heard = list(zip(*streams, strict=True))
    assert [[piece.token_id for piece in each] for each in zip(*heard, strict=True)] == alone
    # Each is told what came for itself alone: for the prompt and for every token but the last.
    passing = 6 * both.layers.passing.nbytes if both.layers.passing else 0
    assert [piece.metrics.streamed_bytes for piece in heard[-1]] == [passing] * 2


# --- when they come ------------------------------------------------------------------------------


def test_the_next_layer_comes_while_one_computes(both: Pair) -> None:
    """And after the last the first, without being asked for."""
    watched = Watched(both.layers)
    for index in (0, 1, 2, 3):
        both.layers[index]
        assert watched.came.acquire(timeout=120)
        assert watched.brought == [1, 2, 3, 0][: index + 1]


@pytest.mark.parametrize("method", ["full", "kvzip:passage=32,window=4"])
def test_a_layer_comes_once_for_a_whole_prompt(both: Pair, method: str) -> None:
    """In seven chunks, and in a repetition of them; then once for each token."""
    talk = runner(both.streamed, method=method, budget=40, chunk=16).conversation()
    watched = Watched(both.layers)
    talk.read(prompt(100))
    assert watched.came.acquire(timeout=120)
    both.layers.courier.submit(lambda: None).result()
    assert watched.brought == [1, 2, 3, 0]  # the first was there, and is there again
    talk.generate([5], max_new_tokens=3, ignore_eos=True)
    both.layers.courier.submit(lambda: None).result()
    assert watched.brought == [1, 2, 3, 0] * 4


def test_what_came_is_accounted_for(both: Pair) -> None:
    passing = both.layers.passing
    assert passing is not None
    assert passing.nbytes == sum(map(layer_bytes, both.whole.module.model.layers))
    assert passing.bytes_per_s > 0
    talk = runner(both.streamed).conversation()
    for turn in range(2):
        for count in (1, 4):
            answer = talk.generate(prompt(30, turn), max_new_tokens=count, ignore_eos=True)
            assert answer.metrics.streamed_bytes == count * passing.nbytes
    assert "brought 1.9 MiB of weights" in answer.metrics.line()
    (note,) = answer.metrics.notes
    assert note.startswith(
        "--stream disk brings 482.0 KiB of weights to the device for every token"
    )
    most = float(note.split()[-4])
    assert most == pytest.approx(passing.bytes_per_s / passing.nbytes, rel=0.01)
    whole = runner(both.whole).generate(prompt(30), ignore_eos=True).metrics
    assert (whole.streamed_bytes, whole.notes) == (0, ())
    assert "weights" not in whole.line()


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.cases(2, 12)
@pytest.mark.parametrize("setting", ["disk", "ram"])
def test_two_layers_and_the_rest_are_on_the_device(
    tiny: Tiny, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, before, during and after an answer; of experts as many as two layers have."""
    both = pair(tiny, tmp_path, setting)
    module = both.whole.module
    for experts in experts_of(module):
        monkeypatch.setattr(module.config, "_experts_implementation", ONE_BY_ONE)
        monkeypatch.setattr(experts, "forward", experts.forward)
        take_one_by_one(experts)
    slots = 2 * max(map(slot_bytes, both.whole.layers.modules)) + sum(expert_bytes(module)[:2])
    weights = rest_bytes(module) + slots
    whole = TensorMeter(both.whole.tensors()).live
    assert TensorMeter(both.streamed.tensors()).live == weights
    # One layer may be more than the others together: those without keys run with it.
    layers = sum(map(slot_bytes, both.whole.layers.modules)) + sum(expert_bytes(module))
    assert weights < whole or slots > layers
    peaks = []
    for model in (both.streamed, both.whole):
        answer = runner(model, measure="tensors").generate(prompt(60), ignore_eos=True)
        peaks.append(answer.metrics.peak_bytes)
    assert peaks[0] - weights == peaks[1] - whole > 0  # all else is as it was
    assert TensorMeter(both.streamed.tensors()).live == weights


def test_loading_never_holds_more(llama: Tiny, tmp_path: Path) -> None:
    llama.reference.save_pretrained(tmp_path)
    with TensorMeter() as meter:
        model = streamed(llama, tmp_path)
    weights = TensorMeter(model.tensors()).live
    largest = max(parameter.nbytes for parameter in llama.reference.parameters())
    assert weights <= meter.peak < weights + largest + (1 << 17)
    assert meter.peak < sum(parameter.nbytes for parameter in llama.reference.parameters())


def off(model: LoadedModel, fails: range) -> tuple[Exception | None, int]:
    """Let the layers leave the device while some allocations fail; what came of it, and how many
    did."""
    faults = Faults(fails)
    try:
        with faults, torch.inference_mode():  # as reading and answering do
            model.layers = off_device(model)
    except (torch.OutOfMemoryError, ModelError) as error:
        return error, faults.failed
    return None, faults.failed


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("following", [1, 2])
def test_layers_leave_the_device_or_all_is_as_it_was(following: int) -> None:
    """Wherever memory runs out, once or once more; copies come first, then slots."""
    whole = make_tiny("llama").model
    heard, loaded = two_turns(whole), TensorMeter(whole.tensors()).live
    outcomes = []
    for at in range(100):
        model = make_tiny("llama").model
        before = model.layers
        error, failed = off(model, range(at, at + following))
        for ours, theirs in zip(two_turns(model), heard, strict=True):
            assert torch.equal(ours, theirs), at
        held = TensorMeter(model.tensors()).live
        if error is None:
            assert isinstance(model.layers, StreamedLayers) and held < loaded
        else:
            assert isinstance(error, torch.OutOfMemoryError) and model.layers is before
            pairs = zip(model.module.parameters(), whole.module.parameters(), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs), at
            assert loaded <= held < loaded + (1 << 14)
        outcomes.append((error is None, failed))
        if not failed:
            break
    # No copy, no slot beside the layers: twice they come in their place, if memory runs out once.
    assert outcomes[-1] == (True, 0) and len(outcomes) > 10
    assert outcomes.count((True, 1)) == 2 if following == 1 else (False, 2) in outcomes[-4:]


# --- what goes wrong -----------------------------------------------------------------------------


def interrupted(both: Pair, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let a layer's forward pass be interrupted once, after so many calls."""
    layer, calls = both.layers.modules[2], 0
    forward = layer.forward

    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", once)


@pytest.mark.parametrize("after", [1, 2, 6])
def test_an_interrupt_leaves_the_model_usable(
    both: Pair, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """While reading, or within an answer; the prompt is two chunks."""
    expected = tokens(both.whole, prompt(50))
    interrupted(both, monkeypatch, after)
    talk = runner(both.streamed, chunk=32).conversation()
    with pytest.raises(KeyboardInterrupt):
        talk.generate(prompt(50), ignore_eos=True)
    if after > 2:
        assert len(talk.context.pending_ids) == 1  # which the step did not bring into the cache
        said, whole = len(talk.token_ids) + 1 - 50, runner(both.whole, chunk=32).conversation()
        whole.generate(prompt(50), max_new_tokens=said, ignore_eos=True)
        ours, theirs = (each.generate([5], ignore_eos=True) for each in (talk, whole))
        assert ours.token_ids == theirs.token_ids
    else:
        assert talk.generate(prompt(50), ignore_eos=True).token_ids == expected
    assert tokens(both.streamed, prompt(50)) == expected


@pytest.mark.parametrize("error", [ModelError("gone"), KeyboardInterrupt()])
def test_a_layer_that_does_not_come_may_come_later(both: Pair, error: BaseException) -> None:
    expected, watched = tokens(both.whole, prompt(50)), Watched(both.layers)
    for index in range(4):
        watched.failing = {index: error}
        if index == 0:
            both.layers[3]  # the first comes now
        with pytest.raises(type(error)):
            tokens(both.streamed, prompt(50))
        assert not watched.failing
        assert tokens(both.streamed, prompt(50)) == expected


def test_an_interrupt_while_a_layer_is_sent_for_is_no_harm(
    both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is not believed to hold what it held, nor what was to come."""
    expected, submit = tokens(both.whole, prompt(50)), both.layers.courier.submit

    def after(sent: Callable[..., Any], *args: Any) -> None:
        submit(sent, *args)
        raise KeyboardInterrupt

    for index in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(both.layers.courier, "submit", after)
            with pytest.raises(KeyboardInterrupt):
                both.layers[index]
                both.layers[(index + 2) % 4]
        assert tokens(both.streamed, prompt(50)) == expected


# --- numbers in other types ----------------------------------------------------------------------


@pytest.mark.cases(3, 8)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_files_of_another_type_are_rounded_as_transformers_does(
    name: str, stored: torch.dtype, wanted: str, tmp_path: Path
) -> None:
    tiny = make_tiny(name)
    tiny.reference.to(stored).save_pretrained(tmp_path)
    disk, ram = (streamed(tiny, tmp_path, setting, wanted) for setting in ("disk", "ram"))
    experts = torch.arange(4)
    for index in range(4):
        ours, theirs = disk.layers[index], ram.layers[index]
        for each in (disk, ram):
            for own in experts_of(each.layers.modules[index]):
                places = dict(own.arriving(experts))
                for parameter in stacked(own):
                    rows = torch.stack([parameter[places[expert]] for expert in range(4)])
                    parameter.data = rows
        for part, parameter in theirs.named_parameters():
            assert torch.equal(ours.get_parameter(part), parameter), part
    assert torch.equal(disk.module.lm_head.weight, ram.module.lm_head.weight)
    assert disk.dtype == ram.dtype
