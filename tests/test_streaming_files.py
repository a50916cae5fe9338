"""Layers that come from files or host memory: found as transformers finds them, or refused."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file, save_file

from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.errors import ModelError, SettingError
from kvlite.model.layers import Layers
from kvlite.model.load import load_module
from kvlite.model.weights import PLAIN, Weights, held_tensors
from kvlite.offload.weights import buffers
from kvlite.offload.weights.loader import open_without_layers, require_streamable
from tests.conftest import Tiny, make_tiny
from tests.streamed import (
    CPU,
    align,
    change_config,
    files_of,
    loaded,
    pair,
    prompt,
    streamed,
    two_turns,
)
from tests.test_model import BROKEN

CUDA = torch.device("cuda")
FP32 = Weights("fp32", torch.float32)


def opened_alike(folder: Path) -> None:
    """All that is no layer's, as transformers loads it."""
    ours, _ = open_without_layers(folder, device=CPU, weights=FP32)
    theirs, _ = load_module(folder, device=CPU, weights=FP32)
    for name, parameter in theirs.named_parameters(remove_duplicate=False):
        if "layers" not in name:
            assert torch.equal(ours.get_parameter(name), parameter), name
    for name, buffer in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
    tied = [each.lm_head.weight is each.model.embed_tokens.weight for each in (ours, theirs)]
    assert tied[0] == tied[1]
    assert ours.generation_config == theirs.generation_config


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_weights_in_several_files(name: str, tmp_path: Path) -> None:
    tiny = make_tiny(name)
    tiny.reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(files_of(tmp_path)) > 3
    both = pair(tiny, tmp_path)
    for ours, whole in zip(two_turns(both.streamed), two_turns(both.whole), strict=True):
        assert torch.equal(ours, whole)


def without_prefix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): each for name, each in weights.items()}


def with_another_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 2}


def with_the_same_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}


def with_a_head_alone(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    head = weights.pop("model.embed_tokens.weight")
    return {**weights, "lm_head.weight": head}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", dict),
        ("llama", without_prefix),
        ("gemma3", dict),
        ("gemma3", without_prefix),
        ("gemma3", with_another_head),
        ("gemma3", with_the_same_head),
        ("gemma3", with_a_head_alone),
    ],
)
def test_the_rest_is_found_as_transformers_finds_it(
    name: str,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """A Gemma's head is tied to its embedding, a Llama's is its own."""
    make_tiny(name).reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    opened_alike(tmp_path)


@pytest.mark.parametrize(
    "name", ["other sizes", "too few layers", "a weight short", "half a file", "no bytes"]
)
def test_a_broken_folder_is_refused_as_ever(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    change, reason = BROKEN[name]
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    change(folder)
    with pytest.raises(ModelError, match=reason) as error:
        loaded("disk", folder, device=CPU, weights=FP32)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_type_that_is_not_plain_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} is stored as F8_E4M3, which --stream disk can"):
        loaded("disk", folder, device=CPU, weights=FP32)


# --- files that change ---------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def written_over(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, (1, 1))


@pytest.mark.parametrize("change", [cut_short, written_over])
def test_a_file_that_changes_meanwhile_ends_an_answer_in_one_sentence(
    llama: Tiny, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    runner = Runner(streamed(llama, tmp_path), Settings().replace({"method": "full"}))
    talk = runner.conversation()
    pieces = talk.stream_tokens(prompt(50), ignore_eos=True, max_new_tokens=9)
    next(pieces)
    (path,) = files_of(tmp_path)
    change(path)
    with pytest.raises(ModelError, match="load the model again") as error:
        list(pieces)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ModelError, match="load the model again"):
        runner.generate(prompt(50))


def test_files_that_are_removed_meanwhile_are_read_on(llama: Tiny, tmp_path: Path) -> None:
    both = pair(llama, tmp_path)
    expected = two_turns(both.whole)
    shutil.rmtree(tmp_path)
    for ours, whole in zip(two_turns(both.streamed), expected, strict=True):
        assert torch.equal(ours, whole)


# --- host memory ---------------------------------------------------------------------------------


def test_layers_in_many_pieces_of_host_memory(
    llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "PIECE", 1000)
    both = pair(llama, tmp_path, "ram")
    assert len(both.layers.source.layers[0]) > 100  # type: ignore[attr-defined]
    assert torch.equal(two_turns(both.streamed)[0], two_turns(both.whole)[0])


def test_four_bits_come_packed(llama: Tiny, tmp_path: Path) -> None:
    """Their scales stay; a CPU must not pack them anew, as it would where they do not move."""
    nf4 = Weights("nf4", torch.float32)
    both = [streamed(llama, tmp_path, "ram", "nf4"), streamed(llama, tmp_path, "ram", "nf4")]
    both[0].module, _ = load_module(tmp_path, device=CPU, weights=nf4)
    both[0].layers = Layers(both[0].module.model.layers)
    align(both[0].module)
    for model in both:
        for part in model.module.modules():
            if isinstance(part, Linear4bit):
                part.support_avx512bf16_for_cpu = False
    for ours, theirs in zip(*map(two_turns, both), strict=True):
        assert torch.equal(ours, theirs)
    passing = both[1].layers.passing
    assert passing is not None
    layers = both[0].module.model.layers
    packed = sum(each.nbytes for each in layers.parameters())
    assert passing.nbytes == packed < sum(each.nbytes for each in held_tensors(layers))


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "device", "weights", "remedy"),
    [
        ("ram", CPU, "fp32", "use --stream disk"),
        ("ram", CUDA, "int8", "use --weights nf4 or bf16"),
        ("disk", CUDA, "int8", "leave --weights out"),
        ("disk", CPU, "nf4", "leave --weights out"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    tiny_folder: Path, setting: str, device: torch.device, weights: str, remedy: str
) -> None:
    chosen = Weights(weights, PLAIN.get(weights, torch.bfloat16))
    with pytest.raises(SettingError, match=remedy) as error:
        require_streamable(setting, tiny_folder, device=device, weights=chosen)
    assert str(error.value).startswith(f"--stream {setting}") and "\n" not in str(error.value)
    require_streamable("off", tiny_folder, device=device, weights=chosen)


@pytest.mark.parametrize("setting", ["ram", "disk"])
def test_weights_quantized_already_are_not_streamed(tiny_folder: Path, setting: str) -> None:
    stored = Weights("gptq", torch.bfloat16, stored=True)
    with pytest.raises(SettingError, match="are gptq already: name the model they were made from"):
        require_streamable(setting, tiny_folder, device=CUDA, weights=stored)


def test_host_memory_that_is_not_there(tmp_path: Path) -> None:
    make_tiny("llama").reference.save_pretrained(tmp_path)
    change_config(tmp_path, hidden_size=1 << 20, intermediate_size=1 << 22, head_dim=1 << 10)
    bf16 = Weights("bf16", torch.bfloat16)
    with pytest.raises(SettingError, match=r"\d GiB of host memory .* use --stream disk"):
        require_streamable("ram", tmp_path, device=CUDA, weights=bf16)
    require_streamable("disk", tmp_path, device=CUDA, weights=bf16)
