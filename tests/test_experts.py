"""Experts in few bits: one matrix at a time is unpacked, and only those that tokens go through."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor, nn

from kvlite.config.settings import Settings
from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import ModelError
from kvlite.memory.meter import TensorMeter
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.experts import PackedExperts, experts_of, stacked
from kvlite.model.quantizing import Int8Experts, NF4Experts, quantize_experts
from kvlite.model.shape import shape_of
from kvlite.model.weights import Weights, held_tensors
from kvlite.offload.weights.experts import ExpertPool
from kvlite.offload.weights.loader import open_whole
from kvlite.planner.candidates import open_planner
from tests.configs import PUBLISHED
from tests.conftest import Tiny, make_tiny
from tests.streamed import align, streamed, two_turns
from tests.test_forecast import Case, expected, taken

CPU = torch.device("cpu")
NAMES = ["mixtral", "qwen3-moe", "gpt-oss", "glm4-moe", "deepseek-v3", "nemotron-h"]


def quantized(name: str, weights: str = "nf4") -> Tiny:
    tiny = make_tiny(name)
    tiny.model.weights = Weights(weights, torch.float32)
    quantize_experts(tiny.model.module, tiny.model.weights)
    return tiny


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Experts whose matrices were unpacked, in order, none while another was there."""
    numbers: list[int] = []
    alive: list[Any] = []

    def one(own: PackedExperts, expert: int, unpacked: Any = NF4Experts.__getitem__) -> Tensor:
        assert not [each for each in alive if each() is not None]
        matrix: Tensor = unpacked(own, expert)
        alive.append(ref(matrix))
        numbers.append(expert)
        return matrix

    monkeypatch.setattr(NF4Experts, "__getitem__", one)
    return numbers


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_unpacks_its_own_experts_one_by_one(name: str, asked: list[int]) -> None:
    model = quantized(name).model
    chosen: list[int] = []
    for experts in experts_of(model.module):
        experts.register_forward_pre_hook(lambda _, given: chosen.extend(given[1].flatten()))
    cache, policies = model.empty_cache(), layer_policies(parse_method("full"), model.shape, 99, 30)
    logits = prefill(model, cache, torch.arange(3, 33)[None], policies, reserve=4, chunk=20)
    assert {*asked} == {int(each) for each in chosen}
    asked.clear()
    chosen.clear()
    decode_step(model, cache, logits.argmax(-1), policies)
    with_experts = len([*experts_of(model.module)])
    assert len(chosen) == 2 * with_experts and len(asked) == 2 * len(chosen)
    assert sorted(asked) == sorted(int(each) for each in chosen * 2)


@pytest.mark.parametrize("size", [(3, 64, 96), (2, 16, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_expert_is_rounded_by_itself(size: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole[0, 0] = 0
    four, eight = NF4Experts(whole, dtype), Int8Experts(whole, dtype)
    for expert, matrix in enumerate(whole):
        assert four[expert].equal(
            dequantize_4bit(*quantize_4bit(matrix, None, None, 64, True, "nf4"))
        )
        step = matrix.float().abs().amax(1, keepdim=True) / 127
        away = (eight[expert].float() - matrix.float()).abs()
        assert eight[expert].dtype == dtype
        assert (away <= 0.51 * step + 0.004 * matrix.float().abs()).all()


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_no_more_than_a_layer_is_there_as_it_was(weights: str, tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=16,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    chosen = Weights(weights, torch.float32)
    with TensorMeter() as meter:
        module, _ = open_whole(tmp_path, device=CPU, weights=chosen)
    layer = 4 * (4 * 64**2 + 16 * (3 * 64**2 + 64) + 2 * 64)
    held = sum({t.data_ptr(): t.nbytes for t in held_tensors(module)}.values())
    # On a CPU bitsandbytes holds 16 numbers for each of the matrix it rounds.
    assert meter.peak < held + 1.9 * layer < 5 * layer
    assert not [part for part in module.model.layers.modules() if type(part) is nn.Linear]
    assert sum(shape_of(config).weight_bytes(chosen).values()) < 5 * layer


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_packed_experts_come_from_host_memory_in_turn(name: str, tmp_path: Path) -> None:
    model = streamed(make_tiny(name), tmp_path, "ram", "nf4")
    module, _ = open_whole(tmp_path, device=CPU, weights=model.weights)
    align(module)
    whole = replace(make_tiny(name).model, module=module, weights=model.weights)
    for ours, theirs in zip(two_turns(model), two_turns(whole), strict=True):
        assert ours.equal(theirs)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_turn_takes_no_more_than_was_planned(name: str) -> None:
    """Where all tokens go to one expert it takes that; else less."""
    model = quantized(name).model
    weights = TensorMeter(held_tensors(model.module)).live
    cases = (
        Case("full", 300, 256, "16", 64, 1, None),
        Case("snapkv:window=8", 300, 48, "16", 200, 1, 32),
    )
    for case in cases:  # bitsandbytes makes tables of its own, once
        taken(model, case)
    for case in cases:
        planned, real = expected(model, case), taken(model, case)
        assert 0 <= planned - real < 0.06 * (real + weights)


def test_a_layer_is_read_at_a_time_where_few_have_attention(tmp_path: Path) -> None:
    """A plan counts one layer of the model, not all that run with an attention layer."""
    config = PUBLISHED["Qwen3.5-35B-A3B, its text alone"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = Settings(model=str(tmp_path), vram="24GiB", weights="nf4", stream="off")
    planner = open_planner(given, card="RTX 4090")
    plan = planner.best(8000)
    plain = planner.shape.weight_bytes(Weights("bf16", torch.bfloat16))
    layers = sum(plain.values()) - plain["embedding"] - plain["head"]
    assert layers / 40 <= plan.phases["load"]["a weight on its way"] < 1.05 * layers / 40
    assert plan.fits


def through(pool: ExpertPool, layer: int, *chosen: int) -> int:
    """Let a token go through experts of a layer; how many had to come."""
    before = pool.brought
    slots = dict(pool.arriving(layer, torch.tensor([chosen])))
    assert [*slots] == sorted(chosen) and len({*slots.values()}) == len(slots)
    return (pool.brought - before) // pool.layers[0].expert_bytes


@pytest.mark.parametrize("setting", ["disk", "ram"])
def test_experts_that_are_used_most_stay(setting: str, tmp_path: Path) -> None:
    """And each is what it was in its file, wherever it lies."""
    tiny = make_tiny("qwen3-moe")
    model = streamed(tiny, tmp_path, setting)
    pool = model.layers.experts
    assert len(pool.owners) == 8 and pool.pass_bytes == 4 * 2 * pool.layers[0].expert_bytes
    for _ in range(3):
        came = [through(pool, layer, 0, 1) for layer in range(3)]
    assert came == [0, 0, 0]
    assert through(pool, 3, 0, 3) == 2  # there was room for these
    assert through(pool, 3, 1, 2) == 2  # in the place of those that only one token went through
    assert [through(pool, layer, 0, 1) for layer in range(3)] == [0, 0, 0]
    assert through(pool, 3, 1, 2) == 0 and through(pool, 3, 0, 1) == 1
    for layer, whole in enumerate(experts_of(tiny.model.module)):
        for expert, slot in pool.arriving(layer, torch.arange(4)):
            for stack, stacks in zip(pool.stacks, stacked(whole), strict=True):
                assert stack[slot].equal(stacks[expert])


def test_an_expert_that_does_not_come_may_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = streamed(make_tiny("qwen3-moe"), tmp_path)
    expected, bring = two_turns(model), model.layers.experts.source.bring
    left = [*range(5)]

    def fails(*given: Any) -> None:
        bring(*given)
        if left and left.pop() in (0, 3):
            raise ModelError("gone")

    model.layers.experts.slots.clear()
    model.layers.experts.owners[:] = -1
    monkeypatch.setattr(model.layers.experts.source, "bring", fails)
    for _ in range(2):
        with pytest.raises(ModelError, match="gone"):
            two_turns(model)
    for ours, theirs in zip(two_turns(model), expected, strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize(("gives", "slots", "stays"), [("900KiB", 8, False), ("6MiB", 16, True)])
def test_what_is_left_is_for_experts(gives: str, slots: int, stays: bool, tmp_path: Path) -> None:
    """What stays is planned, and takes what was planned."""
    tiny = make_tiny("qwen3-moe")
    tiny.reference.save_pretrained(tmp_path)
    given = Settings(model=str(tmp_path), weights="fp32", stream="disk", vram=gives, device="cpu")
    plan = open_planner(given).best(64)
    assert plan.fits and plan.resident.layers == stays
    model = streamed(tiny, tmp_path, resident=plan.resident)
    assert len(model.layers.experts.owners) == slots
    held = TensorMeter(model.tensors()).live
    assert held == pytest.approx(plan.weight_bytes, rel=0.02)
    two_turns(model)
    before = model.layers.brought
    two_turns(model)
    assert (model.layers.brought == before) == stays
