"""Packed weights on a CPU: GGUF's blocks recovered, products, bytes, loading, refusals."""

import shutil
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor, nn

import kvlite
from kvlite.engine.decode import decode_step
from kvlite.engine.prefill import prefill
from kvlite.errors import SettingError, Stopped
from kvlite.memory.meter import TensorMeter
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.architectures import has_experts
from kvlite.model.packed_linear import FEW_ROWS, GROUP, PackedEmbedding, PackedLinear, PackedWeights
from kvlite.model.packing import pack_linears, quantize, quantize_8bit
from kvlite.model.shape import read_shape
from kvlite.model.weights import Weights, choose_weights, held_tensors
from kvlite.offload.weights.loader import open_by_layer
from tests.conftest import Tiny
from tests.test_smollm import greedy
from tests.test_weights import storages

CPU = torch.device("cpu")
INT4 = Weights("int4", torch.float32)


def blocks(kind: str, outputs: int, inputs: int) -> Tensor:
    """Weights `(outputs, inputs)` of random GGUF blocks, as the gguf package reads them."""
    random = np.random.default_rng(0)
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = random.integers(0, 256, (outputs * inputs // size, nbytes), np.uint8)
    scales = random.uniform(0.001, 0.1, (len(data), 2)).astype(np.float16).view(np.uint8)
    begin = nbytes - 2 if kind == "Q6_K" else 0
    end = begin + (4 if kind in ("Q4_1", "Q4_K") else 2)
    data[:, begin:end] = scales[:, : end - begin]
    if kind == "Q8_0":  # one of them is the largest there is, as its quantizer sees to
        codes = data[:, 2:].view(np.int8)
        codes[codes == -128] = 5
        codes[np.arange(len(data)), random.integers(0, 32, len(data))] = 127
    weight = dequantize(data.reshape(outputs, -1), GGMLQuantizationType[kind])
    return torch.from_numpy(weight)


def by_number(codes: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """What codes mean, number by number."""
    plain = torch.empty(codes.shape)
    for row in range(len(codes)):
        for column in range(codes.shape[1]):
            group = column // GROUP
            scale, offset = float(scales[row, group]), float(offsets[row, group])
            plain[row, column] = int(codes[row, column]) * scale + offset
    return plain


def dequantized(weight: Tensor) -> Tensor:
    """What `--weights int4` makes of weights that are on no grid."""
    parts, exact = quantize(weight, on_grid=False)
    assert not exact
    return by_number(*parts)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0"])
def test_the_blocks_of_a_gguf_are_recovered(kind: str) -> None:
    weight = blocks(kind, 6, 512)
    found = quantize_8bit(weight) if kind == "Q8_0" else quantize(weight, on_grid=True)
    parts, exact = found
    assert exact
    most = weight.unflatten(1, (-1, GROUP)).abs().amax(2, keepdim=True)
    far = (by_number(*parts) - weight).unflatten(1, (-1, GROUP)).abs()
    assert (far <= 2**-21 * most).all()


@pytest.mark.parametrize("kind", ["Q5_0", "Q6_K", "Q8_0"])
def test_other_weights_are_not_taken_for_4_bits(kind: str) -> None:
    assert not quantize(blocks(kind, 6, 512), on_grid=True)[-1]


def test_groups_of_equal_weights_are_what_they_are() -> None:
    weight = torch.tensor([[0.0], [0.5], [-3.0]]).expand(3, 32)
    parts, exact = quantize(weight, on_grid=True)
    assert exact
    assert torch.equal(by_number(*parts), weight)


@pytest.mark.parametrize("outputs", [1, 100, 5000])
@pytest.mark.parametrize("bits", [4, 8])
def test_products(outputs: int, bits: int) -> None:
    """Of one row, some, and many; with packed weights and with unpacked ones."""
    torch.manual_seed(1)
    weight, bias = torch.randn(outputs, 96), nn.Parameter(torch.randn(outputs))
    parts, _ = quantize(weight, on_grid=False) if bits == 4 else quantize_8bit(weight)
    packed = PackedLinear(PackedWeights(*parts, bits), bias)
    codes, scales, offsets = parts
    plain = codes.unflatten(1, (-1, GROUP)) * scales[..., None] + offsets[..., None]
    plain = plain.flatten(1)
    torch.testing.assert_close(packed.weight.unpacked(0, outputs).t(), plain)
    rows = torch.randn(2, 40, 96)
    expected = nn.functional.linear(rows, plain, bias)
    for count in (1, 3, FEW_ROWS, FEW_ROWS + 1, 40):
        found = packed(rows[:, :count])
        torch.testing.assert_close(found, expected[:, :count], rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(packed(rows[0, 0]), expected[0, 0], rtol=1e-5, atol=5e-5)


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlite.ops.numba_quant.CHANNELS_A_THREAD", 1 << 10)
    parts, _ = quantize(torch.randn(500, 96), on_grid=False)
    row = torch.randn(1, 96)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(PackedWeights(*parts, 4).product(row))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("bits", [4, 8])
def test_results_do_not_depend_on_other_rows(bits: int) -> None:
    plain = torch.randn(3000, 96)
    parts, _ = quantize(plain, on_grid=False) if bits == 4 else quantize_8bit(plain)
    weight, rows = PackedWeights(*parts, bits), torch.randn(8, 96)
    alone = torch.cat([weight.product(row[None]) for row in rows])
    for count in (2, 4, 5, 8):
        assert torch.equal(weight.product(rows[:count]), alone[:count])


def test_an_embedding() -> None:
    weight = blocks("Q8_0", 50, 96)
    parts, _ = quantize_8bit(weight)
    ids = torch.tensor([[3, 0, 49], [7, 7, 1]])
    found = PackedEmbedding(PackedWeights(*parts, 8))(ids)
    torch.testing.assert_close(found, weight[ids], rtol=0, atol=1e-5)


def test_layers_with_broken_groups_stay_plain() -> None:
    layers = nn.Sequential(nn.Linear(64, 8), nn.ModuleList([nn.Linear(48, 8), nn.ReLU()]))
    pack_linears(layers, lossless=False)
    kinds = [type(each) for each in layers.modules()][1:]
    assert kinds == [PackedLinear, PackedWeights, nn.ModuleList, nn.Linear, nn.ReLU]


def test_only_what_is_recovered_is_packed_where_nothing_may_be_lost() -> None:
    layers = nn.Sequential(nn.Linear(64, 8), nn.Linear(64, 8))
    layers[1].weight.data = blocks("Q4_0", 8, 64)
    pack_linears(layers, lossless=True)
    assert [type(each) for each in layers] == [nn.Linear, PackedLinear]


@pytest.mark.cases(6)
def test_bytes_are_those_held(tiny: Tiny, tmp_path: Path) -> None:
    if has_experts(tiny.reference.config.model_type):
        pytest.skip("refused")
    tiny.reference.save_pretrained(tmp_path)
    module, found = open_by_layer(tmp_path, device=CPU, weights=INT4)
    assert not found["missing_keys"]
    own = (".codes", ".scales", ".offsets")
    others = (buffer for name, buffer in module.named_buffers() if not name.endswith(own))
    held = sum(storages(held_tensors(module)).values()) - sum(storages(others).values())
    assert sum(read_shape(tmp_path).weight_bytes(INT4).values()) == held


@pytest.mark.cases(1)
def test_answers_as_transformers_does_with_the_same_weights(
    tiny: Tiny, tiny_folder: Path, tmp_path: Path
) -> None:
    """Every architecture."""
    if has_experts(tiny.reference.config.model_type):
        pytest.skip("refused")
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    tiny.reference.save_pretrained(folder)
    runner = kvlite.load(str(folder), weights="int4", method="full")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for part in reference.model.layers.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = dequantized(part.weight.data)
    ids = torch.arange(3, 78).tolist()
    answer = runner.generate(ids, max_new_tokens=24, ignore_eos=True)
    assert answer.token_ids == greedy(reference, ids, 24)
    assert (answer.metrics.weights, answer.metrics.dtype) == ("int4", "float32")


def test_no_more_than_a_layer_is_unpacked_while_loading(tmp_path: Path) -> None:
    sizes = {"vocab_size": 99, "hidden_size": 128, "intermediate_size": 512}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with TensorMeter() as meter:
        module, _ = open_by_layer(tmp_path, device=CPU, weights=INT4)
    layer = 4 * (4 * 128 * 128 + 3 * 128 * 512)
    held = sum(storages(held_tensors(module)).values())
    assert meter.peak < held + 3 * layer < 12 * layer


def test_loading_can_be_stopped(tiny_folder: Path) -> None:
    cancel = Event()
    cancel.set()
    with pytest.raises(Stopped):
        open_by_layer(tiny_folder, device=CPU, weights=INT4, cancel=cancel)


def test_a_plan_counts_what_is_unpacked(tiny_folder: Path) -> None:
    runner = kvlite.load(str(tiny_folder), weights="int4", vram="64MB")
    answer = runner.generate(list(range(3, 1003)), max_new_tokens=4, ignore_eos=True)
    assert answer.metrics.plan_error == 0


@pytest.fixture
def gguf_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A tiny model as it would be converted from a GGUF file: layers in Q4_0, the embedding, which
    is the head too, in Q8_0."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "converted"))
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    config = transformers.LlamaConfig(
        **sizes,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    module = transformers.LlamaForCausalLM(config)
    for part in module.model.layers.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = blocks("Q4_0", *part.weight.shape) / 8
    module.model.embed_tokens.weight.data = blocks("Q8_0", 96, 64)
    module.save_pretrained(folder)
    return folder


def test_auto_keeps_what_a_gguf_has(gguf_folder: Path) -> None:
    """Layers and embedding; answers are those of plain weights, and files of either open with the
    other."""
    packed, plain = (kvlite.load(str(gguf_folder), weights=each) for each in ("auto", "fp32"))
    chosen = packed.model.weights
    assert (chosen.name, chosen.lossless, chosen.packed_embedding) == ("int4", True, True)
    assert isinstance(packed.model.module.lm_head, PackedLinear)
    held = sum(storages(held_tensors(packed.model.module)).values())
    stated = sum(packed.shape.weight_bytes(chosen).values())
    assert stated < held < stated + 1000  # rotary frequencies
    ids = torch.arange(3, 78).tolist()
    answers = [
        each.generate(ids, max_new_tokens=24, ignore_eos=True).token_ids for each in (packed, plain)
    ]
    assert answers[0] == answers[1]
    path = gguf_folder / "said.kv"
    for one, other in ((packed, plain), (plain, packed)):
        talk = one.conversation()
        talk.generate(ids[:40], ignore_eos=True)
        talk.save(path)
        assert other.open(path).context.token_ids == talk.context.token_ids


@pytest.mark.long
def test_predictions_of_the_embedded_model_stay(smollm: kvlite.Runner, prose: list[int]) -> None:
    """KL divergence from fp32 at most 1e-6: its weights are 4-bit in the file."""
    model = kvlite.load("smollm2-135m", weights="int4").model
    assert (model.weights.lossless, model.weights.packed_embedding) == (True, True)
    method, read, answered = parse_method("full"), 100, 24
    logits: list[list[Tensor]] = []
    for each in (smollm.model, model):
        policies = layer_policies(method, each.shape, read, read)
        cache = each.empty_cache()
        first = prefill(each, cache, torch.tensor([prose[:read]]), policies)
        tokens = prose[read : read + answered]
        steps = [decode_step(each, cache, torch.tensor([token]), policies) for token in tokens]
        logits.append([first, *steps])
    for whole, packed in zip(*logits, strict=True):
        ours, theirs = packed.log_softmax(-1), whole.log_softmax(-1)
        assert float((theirs.exp() * (theirs - ours)).sum()) < 1e-6


def test_refusals(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="--weights int4 is for a CPU, not cuda: use nf4"):
        choose_weights("int4", torch.device("cuda"), tiny_folder)
    with pytest.raises(SettingError, match="--stream disk reads weights as the files have them"):
        kvlite.load(str(tiny_folder), weights="int4", stream="disk")
    monkeypatch.setattr("kvlite.model.weights.find_spec", lambda name: None)
    with pytest.raises(SettingError, match="--weights int4 needs numba, which is not installed"):
        kvlite.load(str(tiny_folder), weights="int4")
