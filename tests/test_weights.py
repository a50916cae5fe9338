"""Quantized weights: as few bytes as stated, transformers' tokens, refusals in a sentence."""

import copy
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file, save_file
from torch import nn

import kvlite
import kvlite.model.load as load
import kvlite.model.weights as choice
from kvlite.engine.prefill import prefill
from kvlite.engine.selfcheck import require_own_answers
from kvlite.errors import KvliteError, ModelError, SettingError
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.architectures import EXPANDS
from kvlite.model.attention_interface import ATTENTION
from kvlite.model.cpu import SplitLinear
from kvlite.model.load import LoadedModel
from kvlite.model.shape import read_shape
from kvlite.model.weights import (
    PLAIN,
    Weights,
    choose_weights,
    held_tensors,
    keep_odd_sizes_unpacked,
)
from kvlite.offload.weights.loader import open_whole
from tests.conftest import Tiny, parts_of
from tests.test_smollm import greedy

CPU = torch.device("cpu")
NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.float32,
    "bnb_4bit_use_double_quant": True,
}
QUANTIZED = {"nf4": NF4, "int8": {"load_in_8bit": True}}
CLASSES = {"nf4": Linear4bit, "int8": Linear8bitLt}
CHOICES = ["fp32", "bf16", "fp16", "int8", "nf4"]


def weights_of(name: str, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(name, PLAIN.get(name, dtype))


def as_transformers_loads_it(folder: Path, name: str) -> Any:
    """Without `name`'s help: what transformers' documentation says to do; what makes keys of
    latents is left as it is."""
    left = {"llm_int8_skip_modules": ["lm_head", EXPANDS]}
    known = name in QUANTIZED
    config = transformers.BitsAndBytesConfig(**QUANTIZED[name], **left) if known else None
    told = {"quantization_config": config} if config else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map={"": "cpu"}, attn_implementation="eager", **told
    )
    # bitsandbytes fails on sizes that are no multiples of its blocks, on some processors only.
    keep_odd_sizes_unpacked(model)
    return model.eval()


def with_linears_of(module: Any, reference: Any) -> Any:
    """The reference with the quantized linear layers of a module in the place of its own."""
    made = copy.deepcopy(reference)
    for name, part in module.named_modules():
        if type(part) in CLASSES.values():
            made.set_submodule(name, part)
    return made


def round_experts(reference: Any, name: str) -> None:
    """What transformers leaves as it is: each expert's matrix by itself, in nf4 as bitsandbytes
    rounds it, or row by row in 8 bits."""
    for part, stack in reference.named_parameters():
        if ".experts." in part and stack.dim() == 3:
            for matrix in stack.data:
                if name == "nf4":
                    rounded = dequantize_4bit(*quantize_4bit(matrix, None, None, 64, True, "nf4"))
                else:
                    step = matrix.abs().amax(1, keepdim=True) / 127
                    rounded = (matrix / step).round() * step
                matrix.copy_(rounded)


def storages(tensors: Any) -> dict[int, int]:
    """Bytes of each storage, by its address."""
    found = (t.untyped_storage() for t in tensors if t.device.type == "cpu")
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.cases(8, 46)
@pytest.mark.parametrize("name", CHOICES)
def test_bytes_are_those_held(tiny: Tiny, name: str, tmp_path: Path) -> None:
    """To the byte, group by group, before the first token."""
    tiny.reference.save_pretrained(tmp_path)
    shape, weights = read_shape(tmp_path), weights_of(name)
    module, _ = open_whole(tmp_path, device=CPU, weights=weights)
    stated = shape.weight_bytes(weights)
    buffers = storages(module.buffers())
    held = storages(held_tensors(module))
    assert sum(stated.values()) == sum(held.values()) - sum(buffers.values())
    head = module.lm_head.weight is not module.get_input_embeddings().weight
    beside = [
        part for own, part in module.model.named_children() if own != "layers" and "norm" not in own
    ]
    own = [
        storages(held_tensors(part)) | dict.fromkeys(storages(part.buffers()), 0) for part in beside
    ]
    assert stated["embedding"] == sum(sum(each.values()) for each in own)
    assert stated["head"] == (module.lm_head.weight.nbytes if head else 0)
    parts = [part for layer in module.model.layers for part in parts_of(layer, "attention")]
    attention = [held_tensors(part) for part in parts]
    norms = [
        parameter for part in parts for own, parameter in part.named_parameters() if "norm" in own
    ]
    inner = sum(sum(storages(tensors).values()) for tensors in attention)
    assert stated["attention"] == inner - sum(norm.nbytes for norm in norms)


# --- the same tokens as transformers -------------------------------------------------------------


@pytest.mark.cases(4, 20)
@pytest.mark.parametrize("name", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_answers_as_transformers_does(
    tiny: Tiny, name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Every architecture that may be quantized, over more than its window."""
    if tiny.model.shape.model_type in ("granitemoehybrid", "nemotron_h"):
        pytest.skip("transformers leaves what follows its recurrences as it is, kvlite does not")
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    tiny.reference.save_pretrained(folder)
    runner = kvlite.load(str(folder), weights=name, method="full")
    if tiny.model.shape.model_type == "gemma4_text":
        # One that transformers quantizes is not what its files say.
        reference = with_linears_of(runner.model.module, tiny.reference)
    else:
        reference = as_transformers_loads_it(folder, name)
    round_experts(reference, name)
    parts = runner.model.module.model.layers.modules()
    assert CLASSES[name] in {type(part) for part in parts}
    ids = torch.arange(3, 78).tolist()
    answer = runner.generate(ids, max_new_tokens=32, ignore_eos=True)
    assert answer.token_ids == greedy(reference, ids, 32)
    assert (answer.metrics.weights, answer.metrics.dtype) == (name, "float32")


@pytest.mark.long
def test_the_embedded_model_answers_as_transformers_does_in_nf4(
    smollm_folder: Path, prose: list[int]
) -> None:
    """Multiplied in float32, as on processors without bfloat16."""
    runner = kvlite.load("smollm2-135m", weights="nf4", method="full")
    reference = as_transformers_loads_it(smollm_folder, "nf4")
    for module in (runner.model.module, reference):
        for part in module.modules():
            part.support_avx512bf16_for_cpu = False
    answer = runner.generate(prose[:100], max_new_tokens=16, ignore_eos=True)
    assert answer.token_ids == greedy(reference, prose[:100], 16)


@pytest.mark.long
def test_logits_of_the_embedded_model_in_int8_are_near_those_of_transformers(
    smollm_folder: Path, prose: list[int]
) -> None:
    """Not equal: 8-bit activations amplify what two attention functions round differently, and
    LLM.int8() keeps columns apart that hold an outlier in any row given together."""
    model = kvlite.load("smollm2-135m", weights="int8").model
    ids = torch.tensor([prose[:300]])
    with torch.no_grad():
        reference = as_transformers_loads_it(smollm_folder, "int8")
        theirs = reference(ids, logits_to_keep=1).logits[:, -1].log_softmax(-1)
    for chunk in (300, 64):
        policies = layer_policies(parse_method("full"), model.shape, 300, 300)
        ours = prefill(model, model.empty_cache(), ids, policies, chunk=chunk).log_softmax(-1)
        assert (theirs.exp() * (theirs - ours)).sum() < 0.03


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_plain_weights_answer_as_named(tiny_folder: Path, name: str) -> None:
    runner = kvlite.load(str(tiny_folder), weights=name)
    answer = runner.generate(list(range(3, 40)), max_new_tokens=2)
    assert runner.model.dtype == PLAIN[name] == runner.model.module.lm_head.weight.dtype
    assert answer.metrics.weights == name
    assert answer.metrics.dtype == str(PLAIN[name]).removeprefix("torch.")


@pytest.mark.parametrize("name", QUANTIZED)
def test_activations_and_cache_are_not_of_the_weights_type(tiny_folder: Path, name: str) -> None:
    """Nor are quantized layers split."""
    model = kvlite.load(str(tiny_folder), weights=name).model
    packed = {p.dtype for p in model.module.parameters() if not p.is_floating_point()}
    assert packed == {torch.uint8 if name == "nf4" else torch.int8}
    assert model.dtype == torch.float32 == model.empty_cache().layers[0].keys.dtype
    assert type(model.module.lm_head) is SplitLinear
    parts = model.module.model.layers.modules()
    assert {type(part) for part in parts if isinstance(part, nn.Linear)} == {CLASSES[name]}


def test_sizes_that_are_no_multiples_of_blocks_stay_unpacked() -> None:
    sizes = [(64, 64, True), (64, 96, True), (96, 64, False), (64, 33, False), (128, 32, True)]
    layers = nn.ModuleList(Linear4bit(inputs, outputs) for inputs, outputs, _ in sizes)
    layers.append(nn.Linear(3, 3))
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True  # as on such a processor
    keep_odd_sizes_unpacked(layers[:-1])
    kept = [layer.support_avx512bf16_for_cpu for layer in layers]
    assert kept == [*(fits for *_, fits in sizes), True]


# --- choosing ------------------------------------------------------------------------------------


def test_auto_on_a_cpu_is_fp32_and_quantized_weights_keep_its_activations(
    tiny_folder: Path,
) -> None:
    chosen = {name: choose_weights(name, CPU, tiny_folder) for name in ("auto", *CHOICES)}
    assert chosen.pop("auto") == Weights("fp32", torch.float32)
    assert {name: each.name for name, each in chosen.items()} == {name: name for name in CHOICES}
    assert chosen["nf4"].dtype == chosen["int8"].dtype == torch.float32
    assert [chosen[name].config for name in PLAIN] == [None] * 3


@pytest.mark.parametrize(("has_bfloat16", "name"), [(True, "bf16"), (False, "fp16")])
def test_auto_on_a_gpu(
    tiny_folder: Path, has_bfloat16: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bfloat16)
    gpu = torch.device("cuda")
    assert choose_weights("auto", gpu, tiny_folder) == Weights(name, PLAIN[name])
    for quantized in QUANTIZED:
        assert choose_weights(quantized, gpu, tiny_folder) == Weights(quantized, PLAIN[name])
    config = choose_weights("nf4", gpu, tiny_folder).config
    assert config.bnb_4bit_compute_dtype == PLAIN[name]
    assert config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_use_double_quant


def test_without_bitsandbytes(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"nf4 needs bitsandbytes.*pip install"):
        kvlite.load(str(tiny_folder), weights="nf4")
    assert kvlite.load(str(tiny_folder)).model.weights.name == "fp32"


# --- checkpoints that are quantized already ------------------------------------------------------


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be changed."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def declare(folder: Path, quantization: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", [{"bnb_4bit_use_double_quant": False}, None])
def test_a_checkpoint_quantized_by_bitsandbytes(folder: Path, changes: Any) -> None:
    options = {"load_in_8bit": True} if changes is None else {**NF4, **changes}
    config = transformers.BitsAndBytesConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=config
    )
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    kinds = {w.dtype for w in load_file(folder / "model.safetensors").values()}
    assert kinds & {torch.uint8, torch.int8}
    runner = kvlite.load(str(folder), method="full")
    name = "int8" if changes is None else "nf4"
    assert runner.model.weights == Weights(name, torch.float32, stored=True)
    assert type(runner.model.layers[0].mlp.up_proj) is CLASSES[name]
    ids = list(range(100, 175))
    answer = runner.generate(ids, max_new_tokens=32, ignore_eos=True)
    assert answer.token_ids == greedy(as_transformers_loads_it(folder, ""), ids, 32)
    assert answer.metrics.weights == name
    with pytest.raises(SettingError, match=f"--weights bf16 cannot .*weights are {name} already"):
        kvlite.load(str(folder), weights="bf16")


def test_a_checkpoint_of_compressed_tensors(folder: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    config = {"config_groups": groups, "ignore": ["lm_head"], "quantization_status": "frozen"}
    quantization.apply_quantization_config(
        model, quantization.QuantizationConfig.model_validate(config)
    )
    for part in model.model.layers.modules():
        if hasattr(part, "weight_scale"):
            part.weight_scale.data.copy_(part.weight.abs().amax(1, keepdim=True) / 7)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    compressor.update_config(folder)
    assert any("packed" in name for name in load_file(folder / "model.safetensors"))
    runner = kvlite.load(str(folder), method="full")
    assert runner.model.weights.name == "compressed-tensors"
    ids = list(range(100, 175))
    answer = runner.generate(ids, max_new_tokens=32, ignore_eos=True)
    assert answer.token_ids == greedy(as_transformers_loads_it(folder, ""), ids, 32)


def test_scales_without_a_place_are_refused(folder: Path) -> None:
    """As transformers would load them if it did not hear of the quantization."""
    declare(folder, {**NF4, "bnb_4bit_compute_dtype": "float32", "quant_method": "bitsandbytes"})
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(96, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as error:
        kvlite.load(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "pip install gptqmodel"),
        ({"quant_method": "gptq", "bits": 4}, "pip install (optimum|gptqmodel)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 weights would be unpacked"),
        ({"quant_method": "magic"}, "magic"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"quant_method": "gptq"}, "missing 1 required positional argument: 'bits'"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "only one can be used at the same time"),
        ({"bits": 4}, "quant_method"),
        (["nf4"], "config.json does not describe a model"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs some of them")
def test_a_checkpoint_that_cannot_stay_quantized_is_refused(
    folder: Path, quantization: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence, before a weight is read: transformers would skip or unpack some of them."""

    def load_module(*_: Any, **__: Any) -> None:
        pytest.fail("weights would be read")

    monkeypatch.setattr(load, "load_module", load_module)
    declare(folder, quantization)
    with pytest.raises(KvliteError, match=said) as error:
        kvlite.load(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


# --- the check at the start ----------------------------------------------------------------------


def test_the_check_sees_what_the_loop_leaves_out(
    kind: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admits architectures of every kind; refuses where other embeddings go into the layers."""
    embed = LoadedModel.embed
    require_own_answers(kind.model)
    assert kind.model.module.config._attn_implementation == ATTENTION
    monkeypatch.setattr(LoadedModel, "embed", lambda model, ids: embed(model, ids.flip(1)))
    with pytest.raises(ModelError, match="do not run layer by layer: logits are"):
        require_own_answers(kind.model)

    def nowhere(model: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
        embedded = embed(model, ids)
        embedded[..., : model.shape.hidden] *= torch.nan  # Gemma's have the ids behind these
        return embedded

    monkeypatch.setattr(LoadedModel, "embed", nowhere)
    with pytest.raises(ModelError, match="do not run layer by layer"):
        require_own_answers(kind.model)
    assert kind.model.module.config._attn_implementation == ATTENTION


def test_the_check_is_made_of_quantized_checkpoints_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedModel, "logits", lambda model, hidden: torch.zeros(1, 49_152))
    declare(folder, None)  # which is none
    assert kvlite.load(str(folder), weights="nf4").model.weights == weights_of("nf4")
    config = transformers.BitsAndBytesConfig(**NF4)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=config
    )
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"nf4 weights in .* do not run layer by layer"):
        kvlite.load(str(folder))


# --- what it says on the screen ------------------------------------------------------------------


@pytest.mark.long
def test_ask_says_nothing_but_the_answer_and_its_account(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cat sat on the mat and the dog lay by the door. " * 9)
    command = [sys.executable, "-m", "kvlite", "ask", str(tmp_path / "text.txt"), "What?"]
    flags = ["--model", str(tiny_folder), "--weights", "int8", "--max-tokens", "4", "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["weights"], answer["dtype"], answer["device"]) == ("int8", "float32", "cpu")


def test_other_warnings_are_still_heard(caplog: pytest.LogCaptureFixture) -> None:
    choice.hush_bitsandbytes()
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    logger.warning("MatMul8bitLt: inputs will be cast from %s to float16", torch.float32)
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
