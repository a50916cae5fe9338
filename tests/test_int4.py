"""4-bit weights on a CPU: the codes of a GGUF block, products, bytes, loading, refusals."""

import shutil
from pathlib import Path
from threading import Event

import pytest
import torch
import transformers
from torch import Tensor, nn

import kvlite
from kvlite.engine.decode import decode_step
from kvlite.engine.prefill import prefill
from kvlite.errors import SettingError, Stopped
from kvlite.memory.meter import TensorMeter
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model import int4
from kvlite.model.int4 import GROUP, Int4Linear, pack_linears, quantize
from kvlite.model.shape import read_shape
from kvlite.model.weights import EXPERTS, Weights, choose_weights, held_tensors
from kvlite.offload.weights.loader import open_packed
from tests.conftest import Tiny
from tests.test_smollm import greedy
from tests.test_weights import storages

CPU = torch.device("cpu")
INT4 = Weights("int4", torch.float32)


def blocks(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights as GGUF's Q4_1 has them, with their codes, scales and least values."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (outputs, inputs // GROUP, GROUP))
    codes[..., 0], codes[..., 1] = 0, 15  # as its quantizer sees to
    scale = torch.rand(outputs, inputs // GROUP).half().float() + 0.01
    least = -7.5 * scale + 0.1 * torch.randn_like(scale).half().float()
    weight = codes * scale[..., None] + least[..., None]
    return weight.flatten(1), codes.flatten(1), scale, least


def dequantized(weight: Tensor) -> Tensor:
    """What `--weights int4` makes of weights, number by number."""
    codes, scales = quantize(weight)
    plain = torch.empty_like(weight)
    for row in range(len(weight)):
        for column in range(weight.shape[1]):
            scale, offset = scales[column // GROUP, row].tolist()
            plain[row, column] = (int(codes[row, column]) - 8) * scale + offset
    return plain


def test_the_codes_of_a_gguf_block_are_recovered() -> None:
    weight, codes, scale, least = blocks(70, 96)
    found, scales = quantize(weight)
    assert torch.equal(found, codes.int())
    assert torch.equal(scales[..., 0].T, scale.bfloat16())
    assert torch.equal(scales[..., 1].T, (least + 8 * scale).bfloat16())


def test_groups_of_equal_weights_are_what_they_are() -> None:
    weight = torch.tensor([[0.0], [0.5], [-3.0]]).expand(3, 32)
    assert torch.equal(dequantized(weight), weight)


@pytest.mark.parametrize("outputs", [64, 100, 192])
@pytest.mark.parametrize("bias", [True, False])
def test_products(outputs: int, bias: bool) -> None:
    """Many rows exactly as unpacked weights multiply, few within bfloat16."""
    torch.manual_seed(1)
    linear = nn.Linear(96, outputs, bias=bias)
    plain = dequantized(linear.weight.data)
    packed = Int4Linear(linear)
    torch.testing.assert_close(packed.unpacked(torch.float32).T[:outputs], plain)
    rows = torch.randn(2, 20, 96)
    expected = nn.functional.linear(rows, plain, linear.bias)
    torch.testing.assert_close(packed(rows), expected, rtol=1e-4, atol=1e-5)
    few = torch.cat([packed(rows[:, at : at + 4]) for at in range(0, 20, 4)], 1)
    assert few.dtype == torch.float32
    assert (few - expected).abs().max() < 0.01 * expected.abs().max()
    assert not torch.equal(few, expected)  # or the packed product was not used


def test_layers_with_broken_groups_stay_plain() -> None:
    layers = nn.Sequential(nn.Linear(64, 8), nn.ModuleList([nn.Linear(48, 8), nn.ReLU()]))
    pack_linears(layers)
    assert [type(each) for each in layers.modules()][1:] == [
        Int4Linear,
        nn.ModuleList,
        nn.Linear,
        nn.ReLU,
    ]


@pytest.mark.cases(6)
def test_bytes_are_those_held(tiny: Tiny, tmp_path: Path) -> None:
    if tiny.reference.config.model_type in EXPERTS:
        pytest.skip("refused")
    tiny.reference.save_pretrained(tmp_path)
    module, found = open_packed(tmp_path, device=CPU, weights=INT4)
    assert not found["missing_keys"]
    own = (".packed", ".scales")
    others = (buffer for name, buffer in module.named_buffers() if not name.endswith(own))
    held = sum(storages(held_tensors(module)).values()) - sum(storages(others).values())
    assert sum(read_shape(tmp_path).weight_bytes(INT4).values()) == held


@pytest.mark.cases(6)
def test_answers_as_transformers_does_with_the_same_weights(
    tiny: Tiny, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every architecture, all products with unpacked weights."""
    if tiny.reference.config.model_type in EXPERTS:
        pytest.skip("refused")
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    tiny.reference.save_pretrained(folder)
    monkeypatch.setattr(int4, "FEW_ROWS", 0)
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
        module, _ = open_packed(tmp_path, device=CPU, weights=INT4)
    layer = 4 * (4 * 128 * 128 + 3 * 128 * 512)
    held = sum(storages(held_tensors(module)).values())
    assert meter.peak < held + 3 * layer < 12 * layer


def test_loading_can_be_stopped(tiny_folder: Path) -> None:
    cancel = Event()
    cancel.set()
    with pytest.raises(Stopped):
        open_packed(tiny_folder, device=CPU, weights=INT4, cancel=cancel)


def test_a_plan_counts_what_is_unpacked(tiny_folder: Path) -> None:
    runner = kvlite.load(str(tiny_folder), weights="int4", vram="64MB")
    answer = runner.generate(list(range(3, 1003)), max_new_tokens=4, ignore_eos=True)
    assert answer.metrics.plan_error == 0


def test_predictions_of_the_embedded_model_stay(smollm: kvlite.Runner, prose: list[int]) -> None:
    """KL divergence from fp32 at most 1.5e-3 while answering, and 1e-3 where many tokens are read:
    its weights are 4-bit in the file."""
    model = kvlite.load("smollm2-135m", weights="int4").model
    method, read, answered = parse_method("full"), 100, 24
    losses: list[float] = []
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
        losses.append(float((theirs.exp() * (theirs - ours)).sum()))
    assert 0 < losses[0] < 2e-3
    assert 0 < sum(losses[1:]) / answered < 1.5e-3


def test_refusals(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="--weights int4 is for a CPU, not cuda: use nf4"):
        choose_weights("int4", torch.device("cuda"), tiny_folder)
    with pytest.raises(SettingError, match="--stream disk reads weights as the files have them"):
        kvlite.load(str(tiny_folder), weights="int4", stream="disk")
    monkeypatch.setattr("kvlite.model.weights.can_pack", lambda: False)
    with pytest.raises(SettingError, match="--weights int4 is not known on this processor"):
        kvlite.load(str(tiny_folder), weights="int4")
