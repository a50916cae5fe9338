"""The engine's way through CUDA, on a device that a CPU stands in for: the same tokens, nothing on
two devices at once, no waiting for the device, and no more launches than there were."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401  # before there is a device that its kernels would be for
import pytest
import torch
from torch import Tensor

from kvlite.cache import KVCache, parse_kv_bits
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.engine.cuda_graph import GraphDecoder, Replay
from kvlite.engine.prefill import prefill
from kvlite.engine.sampling import Sampler
from kvlite.engine.speculate import Pace
from kvlite.engine.step import StepRows, decode_step
from kvlite.engine.step_program import StepProgram
from kvlite.memory.device_budget import hold
from kvlite.memory.oom import HIDDEN
from kvlite.methods import parse_method
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import LayerPolicy, layer_policies
from kvlite.model.devices import choose_device
from kvlite.model.experts import experts_of, take_one_by_one
from kvlite.model.load import LoadedModel
from kvlite.model.packed_experts import BlockExperts
from kvlite.model.packing import pack_linears
from kvlite.model.quantizing import quantize_experts
from kvlite.model.token_layer import TokenLayer
from kvlite.model.weights import MXFP4, Weights
from kvlite.offload import HostKVStore, Recall
from kvlite.offload.weights.layers import off_device
from kvlite.ops.blocks import FORMATS
from tests.conftest import make_tiny
from tests.cuda import guard
from tests.oracles.packed import blocks
from tests.test_mtp import headed
from tests.test_packed import random_ids

if not guard.POSSIBLE:
    pytest.skip("needs a torch without CUDA, triton and g++", allow_module_level=True)

from tests.cuda.fake_cuda import FakeCuda, fake_cuda

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
LAYERS = SIZES["num_hidden_layers"]


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


DRAWING = Settings(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=1)


@dataclass
class Reading:
    """Tokens that were read, and what goes on from there."""

    model: LoadedModel
    cache: KVCache
    policies: list[LayerPolicy]
    recall: Recall | None
    logits: Tensor

    def rows(self, token: int) -> StepRows:
        """A token as the row of a step."""
        given = torch.tensor([[token]]), self.policies, self.recall
        return StepRows(self.model, self.cache, *given)

    def step(self, token: Tensor | None = None) -> Tensor:
        """Logits after the likeliest token, or another one."""
        token = self.logits.argmax(-1) if token is None else token
        self.logits = decode_step(self.model, self.cache, token, self.policies, self.recall)
        return self.logits


def read(
    model: LoadedModel, method: str, *, bits: str = "", recall: int = 0, count: int = 160
) -> Reading:
    """Some chunks, cut to 80 entries a head."""
    ids, kv_bits = random_ids(count, 1), parse_kv_bits(bits) if bits else None
    policies = layer_policies(parse_method(method), model.shape, 80, count, bits=kv_bits)
    cache = model.empty_cache()
    store = HostKVStore.empty(model.shape, model.dtype, None) if recall else None
    logits = prefill(model, cache, ids, policies, store=store, reserve=64, chunk=64)
    return Reading(model, cache, policies, None if store is None else Recall(store, recall), logits)


# What a step launches in a layer, at most, and beside the layers: of an 8B's 32 layers 374, and 598
# with recall.
STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({"method": "full"}, 11),
    "snapkv": ({"method": "snapkv"}, 11),
    "spans": ({"method": "spans"}, 11),
    "h2o": ({"method": "h2o"}, 26),
    "heads of several lengths": ({"method": "snapkv:per_head=true"}, 14),
    "4 bits": ({"method": "spans", "bits": "4"}, 26),
    "recall": ({"method": "spans", "recall": 16}, 20),
    "recall, 4 bits": ({"method": "spans", "bits": "4", "recall": 16}, 36),
}
BESIDE_LAYERS = 22
MORE = ["qwen3", "gemma3", "phi3-partial"]
# Where reading waits: for the prompt to come, for a constant that is made once, for the choice of
# how many entries a head keeps, and, at the ends, for the host store to be whole.
READING_WAITS = {"Prefill.__init__", "rotation", "compete", "KVTransfer.wait"}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_waited_for(cuda: FakeCuda, name: str) -> None:
    """Neither while reading nor in a step, which launches no more kernels than it did."""
    given, most = STEPS[name]
    model = make_tiny("llama", "cuda", torch.bfloat16, **SIZES).model
    cuda.forget()
    reading = read(model, **given)
    assert {re.split("[.:]<|:", each)[0] for each in cuda.waits} <= READING_WAITS
    reading.step()
    token = reading.logits.argmax(-1)
    cuda.forget()
    reading.step(token)
    assert not cuda.waits
    assert cuda.launched <= LAYERS * most + BESIDE_LAYERS


@pytest.mark.parametrize(
    "name", ["qwen2", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_layers_taken_apart_are_those_of_a_cpu(cuda: FakeCuda, name: str) -> None:
    """Their weights lie together, in as much memory, and the modules go on with them."""
    expected = read(make_tiny(name).model, "full", count=40)
    model = make_tiny(name, "cuda").model
    sizes = [weight.shape for weight in model.module.parameters()]
    logits = read(model, "full", count=40).step().cpu()
    layer, attention = model.step_layer(0), model.layers[0].self_attn
    assert isinstance(layer, TokenLayer)
    assert [weight.shape for weight in model.module.parameters()] == sizes
    if name != "phi3-partial":
        (product,) = layer.qkv.products
        after = product.keywords["weight"].data_ptr() + attention.q_proj.weight.nbytes
        assert attention.k_proj.weight.data_ptr() == after
    again = read(model, "full", count=40)  # through the modules
    assert torch.allclose(again.logits.cpu(), expected.logits, rtol=1e-4, atol=1e-5)
    assert torch.allclose(logits, expected.step(), rtol=1e-4, atol=1e-5)


# What a step launches in a layer as a program, at most, and beside the layers, with drawing.
PROGRAMS = {
    "full": 11,
    "snapkv": 11,
    "h2o": 27,
    "heads of several lengths": 13,
    "4 bits": 31,
    "recall": 21,  # of which two are for all layers
    "recall, 4 bits": 42,
}
BESIDE_PROGRAM = 57


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_waits_for_nothing_but_its_token(cuda: FakeCuda, name: str) -> None:
    model = make_tiny("llama", "cuda", torch.bfloat16, **SIZES).model
    launched = launched_by_a_program(cuda, read(model, **STEPS[name][0]))
    assert launched <= LAYERS * PROGRAMS[name] + BESIDE_PROGRAM


def launched_by_a_program(cuda: FakeCuda, reading: Reading) -> int:
    """What one of three steps launches, none of which waits for more than its token."""
    model, seen = reading.model, [*range(3, 163)]
    reading.step()

    def captured(program: StepProgram) -> Replay:
        program.rehearse()
        return program.run

    graphs = GraphDecoder(
        model, Sampler(EngineConfig.from_settings(DRAWING), model.device), captured
    )
    token: int | None = 5
    for _ in range(3):
        assert token is not None, graphs.reason
        cuda.forget()
        graphs.step([reading.rows(token)], seen)
        seen, waits, launched = [*seen, token], {*cuda.waits}, cuda.launched
        token = graphs.drawn()
    assert graphs.reason == "" and not waits
    return launched


WAYS: list[dict[str, Any]] = [
    {"method": "spans", "recall": "ram"},
    {"method": "snapkv:per_head=true", "recall": "ram"},
    {"method": "full", "kv_bits": "4"},
    {"method": "h2o", "recall": "ram"},
    {"method": "spans", "recall": "ram", "recall_bits": "4"},
    {"method": "spans", "recall": "disk"},
    {"method": "spans", "recall": "off", "scores": "host"},
]


def forgo_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU do everything by torch's functions."""
    modules = (
        "cache.quantization.hadamard",
        "engine.implementations",
        "offload.kv.index",
        "offload.kv.recall",
    )
    for module in modules:
        monkeypatch.setattr(f"kvlite.{module}.has_compiled", lambda device: False)


def two_turns(model: LoadedModel, path: Path, **given: Any) -> list[list[int]]:
    """Answers of a conversation that is saved after the first, and opened for the second."""
    usual = {"budget": 60, "recall_entries": 24, "chunk": 64, "max_new_tokens": 20}
    runner = Runner(model, Settings(**{**usual, **given}))
    talk = runner.conversation()
    first = talk.generate(random_ids(130, 1)[0].tolist(), ignore_eos=True)
    talk.save(path)
    second = runner.open(path).generate(random_ids(30, 2)[0].tolist(), ignore_eos=True)
    return [first.token_ids, second.token_ids]


@pytest.mark.long
def test_speculation_is_that_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With recurrent layers, quantized entries and a head of the model's own."""
    monkeypatch.setattr(Pace, "factor", 0.0)
    forgo_loops(monkeypatch)
    given = Settings(method="full", kv_bits="4", max_new_tokens=16, speculate="auto")

    def answered(model: LoadedModel, *given_up: str) -> tuple[list[int], int, int]:
        talk = Runner(model, given).conversation()
        talk.context.oom_policy.taken += given_up
        said = talk.generate(random_ids(60, 1)[0].tolist(), ignore_eos=True)
        return said.token_ids, said.metrics.proposed_tokens, said.metrics.accepted_tokens

    expected = answered(headed("qwen3-5", right=True).model)
    assert expected[2] > 1
    with fake_cuda():
        assert answered(headed("qwen3-5", "cuda", right=True).model) == expected
        assert answered(headed("qwen3-5", "cuda", right=True).model, HIDDEN) == expected


@pytest.mark.cases(1, 8)
@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("given", WAYS, ids=str)
def test_a_conversation_is_that_of_a_cpu(
    given: dict[str, Any], maps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where kernels do not read the host's memory. Compiled loops search otherwise."""
    forgo_loops(monkeypatch)
    expected = two_turns(make_tiny("llama", **SIZES).model, tmp_path / "cpu.kv", **given)
    with fake_cuda(maps=maps):
        model = make_tiny("llama", "cuda", **SIZES).model
        assert two_turns(model, tmp_path / "cuda.kv", **given) == expected


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("given", [WAYS[0], WAYS[3], WAYS[4]], ids=str)
def test_an_answer_longer_than_planned_is_that_of_a_plan_that_covers_it(
    given: dict[str, Any], maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host store grows, a graph is recorded anew, and what is pinned stays so."""
    forgo_loops(monkeypatch)
    monkeypatch.setattr("kvlite.offload.kv.store.GROWTH", 20)
    usual = {"budget": 60, "recall_entries": 8, "chunk": 64, "max_new_tokens": 110}
    found, programs, recorded = [], list[int](), list[int]()

    def captured(program: StepProgram) -> Replay:
        recorded.append(program.room)
        program.rehearse()
        return program.run

    monkeypatch.setattr(
        "kvlite.conversation.turn.graph_decoder",
        lambda model, sampler: GraphDecoder(model, sampler, captured),
    )
    with fake_cuda(maps=maps):
        model = make_tiny("llama", "cuda", **SIZES).model
        for planned in (64, 110):
            talk = Runner(model, Settings(**{**usual, **given})).conversation()
            talk.settings = talk.settings.replace({"reserve_tokens": planned})
            answer = talk.generate(random_ids(130, 1)[0].tolist(), ignore_eos=True)
            assert talk.store is not None and talk.store.layers[0].head_group.used == 239
            keys = talk.store.layers[0].head_group.residual_keys
            found.append((answer.token_ids, keys.is_pinned()))
            graphs = answer.metrics.graph_steps or 0
            assert (graphs > 90) == (maps and "recall_bits" not in given), answer.metrics.no_graph
            programs.append(len(recorded))
            recorded.clear()
    assert found[0] == found[1]
    assert programs[0] > programs[1] > 0 or not graphs


def test_a_program_does_not_write_to_a_host_store_that_has_grown(cuda: FakeCuda) -> None:
    """As plain steps in its place, such as those with other conversations, let it."""
    reading = read(make_tiny("llama", "cuda", **SIZES).model, "spans", recall=16)
    reading.step()
    assert reading.recall is not None
    sampler = Sampler(EngineConfig.from_settings(DRAWING), reading.model.device)
    with torch.inference_mode():
        program = StepProgram(reading.model, [reading.rows(5)], sampler, [3])
        assert program.serves([reading.rows(5)])
        for index in range(LAYERS):
            full = reading.recall.store.layers[index]
            filled = full.head_group.used
            full.head_group.used += full.room
            reading.recall.store.make_room(index)
            reading.recall.store.layers[index].head_group.used = filled
    assert reading.recall.store.layers[0].room > 64 and not program.serves([reading.rows(5)])


@pytest.mark.long
def test_packed_weights_give_what_they_give_on_a_cpu(tmp_path: Path) -> None:
    """A token by the kernel, in four products a layer, many by weights that it unpacked; nothing
    waits for them."""
    model = make_tiny("llama", **SIZES).model
    pack_linears(model.module.model.layers, torch.float32)
    expected = two_turns(model, tmp_path / "cpu.kv", method="full")
    with fake_cuda() as device:
        model = make_tiny("llama", "cuda", **SIZES).model
        pack_linears(model.module.model.layers, torch.float32)
        assert two_turns(model, tmp_path / "cuda.kv", method="full") == expected
        launched = device.launches
        assert launched["triton_linear._multiply"] and launched["triton_linear._unpack"]
        reading = read(model, "full")
        token = reading.logits.argmax(-1)
        device.forget()
        reading.step(token)
        assert not device.waits
        assert device.launches["triton_linear._multiply"] == 4 * len(model.layers)


def sinking(device: str, weights: str = "", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A gpt-oss whose sinks take a large share, its experts quantized or not."""
    kinds = ["sliding_attention", "full_attention"]
    model = make_tiny("gpt-oss", device, dtype, layer_types=kinds, **SIZES).model
    random = torch.Generator().manual_seed(1)
    for layer in model.layers:
        layer.self_attn.sinks.data.copy_(torch.randn(8, generator=random).mul(2).to(device))
    if weights:
        model.weights = Weights(weights, dtype, stored=weights == MXFP4)
        quantize_experts(model.module, model.weights)
    for name, packed in model.module.named_parameters() if weights == MXFP4 else ():
        if packed.dtype == torch.uint8:  # as files would have it
            low, high = (119, 124) if name.endswith("scales") else (0, 256)
            drawn = torch.randint(low, high, packed.shape, generator=random)
            packed.data.copy_(drawn.byte().to(device))
    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "weights"), zip(WAYS, cycle(["", MXFP4, "int8"]), strict=False), ids=str
)
def test_learned_sinks_are_those_of_a_cpu(
    given: dict[str, Any], weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgo_loops(monkeypatch)
    expected = two_turns(sinking("cpu", weights), tmp_path / "cpu.kv", **given)
    with fake_cuda():
        assert two_turns(sinking("cuda", weights), tmp_path / "cuda.kv", **given) == expected


@pytest.mark.long
@pytest.mark.parametrize("given", [WAYS[2], WAYS[4]], ids=str)
def test_heads_too_wide_for_kernels_are_those_of_a_cpu(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents (MLA), whose kernels no card would have the shared memory for; also in a program."""
    forgo_loops(monkeypatch)
    sizes = {"num_hidden_layers": 2, "kv_lora_rank": 264, "mlp_layer_types": ["dense"] * 2}
    given = {**given, "max_new_tokens": 6}
    expected = two_turns(make_tiny("glm4-moe-lite", **sizes).model, tmp_path / "cpu.kv", **given)
    with fake_cuda() as device:
        model = make_tiny("glm4-moe-lite", "cuda", **sizes).model
        assert two_turns(model, tmp_path / "cuda.kv", **given) == expected
        launched_by_a_program(device, read(model, given["method"], bits=given.get("kv_bits", "")))
        kernels = {name.split(".")[0] for name in device.launches if name.startswith("triton_")}
    assert kernels <= {"triton_write", "triton_layer_ops"}


# Those whose layers have experts, but for recurrent ones: these are no programs.
WITH_EXPERTS = ["mixtral", "qwen3-moe", "glm4-moe", "gemma4-moe", "deepseek-v2", "deepseek-v3"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["gpt-oss", MXFP4, "nf4", *WITH_EXPERTS])
def test_nothing_waits_for_sinks_or_experts(cuda: FakeCuda, name: str) -> None:
    """Their weights are read where they lie, by the numbers that are on the device."""
    if name in ("gpt-oss", MXFP4):
        model = sinking("cuda", name if name == MXFP4 else "", torch.bfloat16)
    elif name == "nf4":
        model = make_tiny("qwen3-moe", "cuda", torch.bfloat16, moe_intermediate_size=64).model
        model.weights = Weights(name, torch.bfloat16)
        quantize_experts(model.module, model.weights)
    else:
        model = make_tiny(name, "cuda", torch.bfloat16).model
    launched_by_a_program(cuda, read(model, "spans"))
    kernel = "_multiply_packed" if name in (MXFP4, "nf4") else "_multiply"
    products = 2 * len([*experts_of(model.module)])
    assert cuda.launches[f"triton_experts.{kernel}"] == products > 0


@pytest.mark.long
def test_nothing_waits_for_experts_in_blocks(cuda: FakeCuda) -> None:
    """Of a file; gates in another format."""
    model = make_tiny("qwen3-moe", "cuda", torch.bfloat16, moe_intermediate_size=64).model
    for experts in experts_of(model.module):
        take_one_by_one(experts)
        for name, kinds in (("gate_up_proj", ["Q4_0", "MXFP4"]), ("down_proj", ["Q8_0"])):
            count, outputs, inputs = getattr(experts, name).shape
            delattr(experts, name)
            own = outputs // len(kinds)
            pieces = [
                (blocks(kind, count * own, inputs).view(count, own, -1).to("cuda"), FORMATS[kind])
                for kind in kinds
            ]
            setattr(experts, name, BlockExperts(pieces, torch.bfloat16))
    launched_by_a_program(cuda, read(model, "spans"))
    layers = len([*experts_of(model.module)])
    assert cuda.launches["triton_linear._multiply"] == 3 * layers > 0


def test_where_memory_is_not_mapped_recall_waits_once_a_layer() -> None:
    with fake_cuda(maps=False) as device:
        reading = read(make_tiny("llama", "cuda", **SIZES).model, "spans", recall=40)
        reading.step()
        device.forget()
        reading.step()
        assert device.waits.pop("KVTransfer.fetch: a stream") == LAYERS
        assert {each.partition(":")[0] for each in device.waits} <= {"KVTransfer._land"}


@pytest.mark.long
def test_streamed_weights_come_while_others_compute(cuda: FakeCuda) -> None:
    """The same logits, and only the thread that brings them waits."""
    model = make_tiny("llama", "cuda", **{**SIZES, "num_hidden_layers": 4}).model
    expected = read(model, "full").step().cpu()
    model.layers = off_device(model)
    reading = read(model, "full")
    cuda.forget()
    logits = reading.step()
    assert not cuda.waits
    assert logits.cpu().equal(expected)


@pytest.mark.parametrize("named", ["auto", "cuda", "cuda:0"])
def test_memory_of_a_device_is_limited_however_it_is_named(cuda: FakeCuda, named: str) -> None:
    for vram in (None, 8 << 30):
        hold(choose_device(named), vram)
