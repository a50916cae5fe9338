"""Packed weights: products with GGUF's blocks, bytes, loading, refusals."""

import os
import shutil
from pathlib import Path
from threading import Event

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from torch import Tensor, nn

import kvlite
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import ModelError, SettingError, Stopped
from kvlite.memory.meter import TensorMeter
from kvlite.methods import parse_method
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.architectures import has_experts
from kvlite.model.gguf.folder import gguf_folder
from kvlite.model.gguf.index import read_index
from kvlite.model.load import load_model
from kvlite.model.packed_linear import FEW_ROWS, PackedEmbedding, PackedLinear, PackedWeights
from kvlite.model.packing import pack_linears, quantized
from kvlite.model.shape import read_shape
from kvlite.model.weights import Weights, choose_weights, held_tensors
from kvlite.offload.weights.loader import open_by_layer, open_whole, require_streamable
from kvlite.ops.blocks import FORMATS
from kvlite.ops.device import MANY_ROWS
from kvlite.planner.candidates import planner_here
from tests.conftest import Tiny
from tests.oracles.packed import blocks, by_gguf
from tests.test_smollm import greedy
from tests.test_weights import storages

CPU = torch.device("cpu")
INT4 = Weights("int4", torch.float32)


def matrix(kind: str, outputs: int, inputs: int) -> tuple[PackedWeights, Tensor]:
    packed = blocks(kind, outputs, inputs)
    return PackedWeights(packed, FORMATS[kind], torch.float32), by_gguf(kind, packed)


@pytest.mark.parametrize("kind", FORMATS)
def test_products(kind: str) -> None:
    """Weights are those the gguf package unpacks, to the last bit, and products theirs: of one row,
    some, and many, whatever other rows there are; also those of a matrix with a few outputs."""
    for outputs in (1, 2500):
        packed, plain = matrix(kind, outputs, 512)
        assert torch.equal(packed.matrix.of_outputs(torch.arange(outputs)), plain)
        bias = nn.Parameter(torch.randn(outputs))
        linear, rows = PackedLinear(packed, bias), torch.randn(2, 30, 512)
        expected = nn.functional.linear(rows, plain, bias)
        far = 2e-6 * float(expected.detach().abs().max())
        for count in (1, 3, FEW_ROWS, FEW_ROWS + 1, 30):
            found = linear(rows[:, :count])
            torch.testing.assert_close(found, expected[:, :count], rtol=0, atol=far)
        alone = torch.cat([linear(row[None]) for row in rows[0, :FEW_ROWS]])
        for count in (2, 4, 5, FEW_ROWS):
            assert torch.equal(linear(rows[0, :count]), alone[:count])


def test_every_exponent_of_mxfp4() -> None:
    """But for the largest, whose weights float32 may not hold; also with 16 levels each."""
    packed = torch.zeros(16, 250 * 17, dtype=torch.uint8).view(16, 250, 17)
    packed[:, :, 0] = torch.arange(250)
    packed[:, :, 1:] = torch.arange(16)[:, None, None] * 17
    packed = packed.flatten(1)
    weights = PackedWeights(packed, FORMATS["MXFP4"], torch.float32)
    assert torch.equal(weights.matrix.of_outputs(torch.arange(16)), by_gguf("MXFP4", packed))


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on which products are formed together; threads have parts of unequal size."""
    from kvlite.ops.numba_linear import joined, product, products_of

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    weights = [matrix(kind, outputs, 512)[0] for kind, outputs in (("Q4_1", 580), ("Q6_K", 192))]
    biases = [torch.randn(each.out_features) for each in weights]
    products = [
        product(each.blocks, each.form, bias) for each, bias in zip(weights, biases, strict=True)
    ]
    for rows in (torch.randn(1, 512).numpy(), torch.randn(6, 512).numpy()):
        alone = np.concatenate([products_of(joined(each), rows) for each in products], 1)
        for threads in (1, 2, 3, 20):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                for _ in range(10):
                    assert np.array_equal(products_of(joined(*products), rows), alone)


def test_an_embedding() -> None:
    packed, plain = matrix("Q8_0", 50, 96)
    ids = torch.tensor([[3, 0, 49], [7, 7, 1]])
    assert torch.equal(PackedEmbedding(packed)(ids), plain[ids])
    assert torch.equal(PackedEmbedding(packed, torch.tensor(8.0))(ids), 8 * plain[ids])


def test_layers_with_broken_groups_stay_plain() -> None:
    layers = nn.Sequential(nn.Linear(64, 8), nn.ModuleList([nn.Linear(48, 8), nn.ReLU()]))
    pack_linears(layers, torch.float32)
    kinds = [type(each) for each in layers.modules()][1:]
    assert kinds == [PackedLinear, PackedWeights, nn.ModuleList, nn.Linear, nn.ReLU]


@pytest.mark.cases(6)
def test_bytes_are_those_held(tiny: Tiny, tmp_path: Path) -> None:
    if has_experts(tiny.reference.config.model_type):
        pytest.skip("refused")
    tiny.reference.save_pretrained(tmp_path)
    module, found = open_by_layer(tmp_path, device=CPU, weights=INT4)
    assert not found["missing_keys"]
    others = sum(storages(module.buffers()).values())
    held = sum(storages(held_tensors(module)).values()) - others
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
        if isinstance(part, nn.Linear) and part.in_features % 32 == 0:
            part.weight.data = by_gguf("Q4_1", quantized(part.weight.data))
    ids = torch.arange(3, 63).tolist()  # few enough to be multiplied in float32
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


KINDS = {"attn_q": "Q5_0", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q4_0"}
KINDS |= {"ffn_gate": "Q5_K", "ffn_up": "Q8_0", "ffn_down": "F16"}


def write_gguf(path: Path, tied: bool) -> None:
    """A tiny Llama with weights of many kinds, other ones in its second layer."""
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(2)
    file.add_embedding_length(256)
    file.add_feed_forward_length(512)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_vocab_size(96)
    file.add_context_length(512)
    file.add_layer_norm_rms_eps(1e-5)
    kinds = {"token_embd": "Q8_0", "output_norm": "F32"} | ({} if tied else {"output": "Q6_K"})
    for layer in (0, 1):
        own = {**KINDS, "attn_norm": "F32", "ffn_norm": "F32"}
        own |= {"attn_v": "Q4_1", "ffn_down": "Q4_K"} if layer else {}
        kinds |= {f"blk.{layer}.{name}": kind for name, kind in own.items()}
    outputs = {"attn_k": 128, "attn_v": 128, "ffn_gate": 512, "ffn_up": 512}
    outputs |= {"token_embd": 96, "output": 96}
    for name, kind in kinds.items():
        short = name.split(".")[-1]
        size = (outputs.get(short, 256), 512 if short == "ffn_down" else 256)
        if kind in FORMATS:
            number = GGMLQuantizationType[kind]
            data = blocks(kind, *size, largest={"Q6_K": 5e-5}.get(kind, 1e-3)).numpy()
            file.add_tensor(f"{name}.weight", data, raw_dtype=number)
        else:
            some = np.random.default_rng(1).standard_normal(size[1:] if "norm" in name else size)
            dtype = np.float16 if kind == "F16" else np.float32
            file.add_tensor(
                f"{name}.weight", (1 + some / 9 if "norm" in name else some / 30).astype(dtype)
            )
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_is_read_where_it_is(
    tied: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those of transformers' own reading of it, bytes those of the file, packed and as
    plain numbers; plans are exact."""
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a.gguf"
    write_gguf(file, tied)
    folder = gguf_folder(file, with_tokenizer=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.arange(3, 78).tolist()
    expected = greedy(reference, tokens, 16)
    settings = Settings(model=str(file), method="full", max_new_tokens=16)
    for setting, numbers in (("auto", "fp32"), ("fp32", "fp32"), ("int4", "int4")):
        weights = choose_weights(setting, CPU, folder)
        assert weights.numbers == numbers
        model = load_model(
            folder, device=CPU, weights=weights, tokenizer=tokenizer, opened=open_whole
        )
        held = sum(storages(held_tensors(model.module)).values())
        held -= sum(storages(model.module.buffers()).values())
        assert sum(model.shape.weight_bytes(weights).values()) == held
        if setting != "auto":
            continue
        given = settings.replace({"weights": setting, "vram": "64MB"})
        planner = planner_here(EngineConfig.from_settings(given), folder, [CPU], reads_text=False)
        runner = Runner(model, given, planner.best(len(tokens)))
        answer = runner.generate(tokens, max_new_tokens=16, ignore_eos=True)
        assert answer.token_ids == expected
        assert answer.metrics.plan_error == 0
        kept = weights
        tensors = weights.index.tensors.values() if weights.index else []
        assert held == sum(each.nbytes * (1 + (each.pieces[0].kind == "F16")) for each in tensors)
    with pytest.raises(SettingError, match="reads safetensors, and the weights of"):
        require_streamable("disk", folder, device=CPU, weights=choose_weights("fp32", CPU, folder))
    os.utime(file, ns=(0, 0))
    assert read_index(folder) is None
    with pytest.raises(ModelError, match="was changed: name the model once more"):
        open_whole(folder, device=CPU, weights=kept)


@pytest.mark.long
def test_predictions_of_the_embedded_model_stay(smollm: kvlite.Runner, prose: list[int]) -> None:
    """KL divergence from fp32 at most 1e-6: its weights are 4-bit in the file. After a prompt that
    is long enough to be read in bfloat16, 3e-4 on average, and 3e-3 at any token: of 25 after 400
    tokens an AVX512_BF16 processor gives one 1.5e-3, and the rest below 4e-4."""
    model = kvlite.load("smollm2-135m").model
    assert model.weights.name == "gguf"
    method, answered = parse_method("full"), 24
    for read, most, usual in ((MANY_ROWS - 1, 1e-6, 1e-6), (400, 3e-3, 3e-4)):
        logits: list[list[Tensor]] = []
        for each in (smollm.model, model):
            policies = layer_policies(method, each.shape, read, read)
            cache = each.empty_cache()
            first = prefill(each, cache, torch.tensor([prose[:read]]), policies)
            tokens = prose[read : read + answered]
            steps = [decode_step(each, cache, torch.tensor([token]), policies) for token in tokens]
            logits.append([first, *steps])
        far = list[float]()
        for whole, packed in zip(*logits, strict=True):
            ours, theirs = packed.log_softmax(-1), whole.log_softmax(-1)
            far.append(float((theirs.exp() * (theirs - ours)).sum()))
        assert max(far) < most and sum(far) / len(far) < usual


def test_refusals(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="keeps weights as a GGUF file has them"):
        choose_weights("gguf", CPU, tiny_folder)
    with pytest.raises(SettingError, match="--stream disk reads weights as the files have them"):
        kvlite.load(str(tiny_folder), weights="int4", stream="disk")
    monkeypatch.setattr("kvlite.model.weights.find_spec", lambda name: None)
    with pytest.raises(SettingError, match="--weights int4 needs numba, which is not installed"):
        kvlite.load(str(tiny_folder), weights="int4")
    with pytest.raises(SettingError, match="--weights int4 needs triton, which is not installed"):
        choose_weights("int4", torch.device("cuda"), tiny_folder)
