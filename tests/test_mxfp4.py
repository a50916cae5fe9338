"""gpt-oss as it is published: experts stay in MXFP4, and say what transformers makes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import kvlite
from kvlite.bench.speed import load_reference
from kvlite.config.settings import Settings
from kvlite.engine.selfcheck import require_own_answers
from kvlite.errors import KvliteError
from kvlite.memory.meter import TensorMeter
from kvlite.model.load import load_model
from kvlite.model.mxfp4 import MXFP4Experts
from kvlite.model.weights import choose_weights, held_tensors
from kvlite.offload.weights.buffers import SCRATCH
from kvlite.offload.weights.loader import open_whole
from kvlite.planner.candidates import open_planner
from tests.configs import PUBLISHED
from tests.conftest import make_tiny
from tests.streamed import loaded, two_turns
from tests.test_forecast import Case, expected, taken
from tests.test_smollm import greedy

CPU = torch.device("cpu")
STORED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as OpenAI has it: blocks and scales for each projection, the rest bfloat16."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path_factory.mktemp("mxfp4") / "model"))
    (folder / "model.safetensors").unlink()
    reference = make_tiny("gpt-oss").reference.to(torch.bfloat16)
    reference.config.quantization_config = STORED
    reference.config.save_pretrained(folder)
    random = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in reference.state_dict().items():
        if weight.dim() < 3:
            stored[name] = weight.contiguous()
            continue
        experts, inputs, outputs = weight.shape
        sizes = experts, outputs, inputs // 32
        stored[f"{name}_blocks"] = torch.randint(256, (*sizes, 16), generator=random).byte()
        stored[f"{name}_scales"] = torch.randint(119, 124, sizes, generator=random).byte()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def as_transformers_unpacks_it(folder: Path) -> Any:
    unpacked = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=unpacked
    ).eval()


@pytest.mark.parametrize("at_once", [1, 5000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_those_of_transformers(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte under every exponent that the type can hold."""
    monkeypatch.setattr("kvlite.model.mxfp4.AT_ONCE_CPU", at_once)
    packed = MXFP4Experts(torch.empty(2, 512, 254), dtype)
    packed.blocks.data = torch.arange(256).repeat(2 * 254).view(2, 254, 16, 16).byte()
    packed.scales.data = torch.arange(254).view(1, 254, 1).repeat(2, 1, 16).byte()
    packed.scales.data[1] += 1
    theirs = convert_moe_packed_tensors(packed.blocks.data, packed.scales.data, dtype=dtype)
    for expert, matrix in enumerate(theirs):
        assert packed[expert].equal(matrix) and packed[expert].dtype == dtype


def test_answers_are_those_of_transformers(folder: Path) -> None:
    runner = kvlite.load(str(folder), method="full")
    ids = torch.arange(3, 78).tolist()
    answer = runner.generate(ids, max_new_tokens=24, ignore_eos=True)
    assert answer.token_ids == greedy(as_transformers_unpacks_it(folder), ids, 24)
    assert answer.token_ids == greedy(load_reference(runner), ids, 24)
    assert answer.metrics.weights == "mxfp4"


def test_weights_take_what_is_planned(folder: Path) -> None:
    weights = choose_weights("auto", CPU, folder)
    planner = open_planner(Settings(model=str(folder), device="cpu"))
    with TensorMeter() as meter:
        module, _ = open_whole(folder, device=CPU, weights=weights)
    buffers = {id(each) for each in module.buffers()}
    held = {t.data_ptr(): t.nbytes for t in held_tensors(module) if id(t) not in buffers}
    plan = planner.plan(planner.usual(), 300)
    assert plan.weight_bytes == sum(held.values())
    assert 0 < meter.peak - sum(held.values()) < plan.passing + SCRATCH + 1000
    experts = sum(each.nbytes for each in module.parameters() if each.dtype == torch.uint8)
    assert experts == 4 * 4 * (2 * 96 * 64 + 64 * 96) * 17 // 32


def test_a_turn_takes_what_was_planned(folder: Path) -> None:
    weights = choose_weights("auto", CPU, folder)
    model = load_model(folder, device=CPU, weights=weights, opened=open_whole)
    require_own_answers(model)
    held = TensorMeter(held_tensors(model.module)).live
    case = Case("snapkv:window=8", 300, 48, "16", 200, 1, 32)
    planned, real = expected(model, case), taken(model, case)
    assert -0.005 < (planned - real) / (held + real) < 0.06


def test_a_published_model_is_planned_at_its_size(tmp_path: Path) -> None:
    """12.8 GiB by its model card, on a card of 16."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gpt-oss-20b"]))
    planner = open_planner(Settings(model=str(tmp_path), vram="16GiB"))
    plan = planner.best(8192)
    assert plan.fits and plan.choice.weights.name == "mxfp4"
    assert round(plan.weight_bytes / 2**30, 1) == 12.8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "nf4"}, "whose weights are mxfp4 already: leave --weights out"),
        ({"weights": "bf16", "stream": "disk"}, "whose weights are mxfp4 already"),
    ],
)
def test_what_cannot_be_had_of_it_is_said(folder: Path, options: Any, said: str) -> None:
    with pytest.raises(KvliteError, match=said):
        kvlite.load(str(folder), **options)


@pytest.mark.parametrize("setting", ["disk", "ram"])
def test_layers_come_in_turn(folder: Path, setting: str) -> None:
    """Packed as they are, from files or host memory."""
    weights = choose_weights("auto", CPU, folder)
    model = loaded(setting, folder, device=CPU, weights=weights)
    whole = load_model(folder, device=CPU, weights=weights, opened=open_whole)
    for ours, theirs in zip(two_turns(model), two_turns(whole), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    layer = sum(each.nbytes for each in whole.layers[0].parameters())
    assert model.layers.brought > 8 * layer
    assert {each.dtype for each in model.layers[1].parameters()} == {torch.uint8, torch.float32}


def test_a_missing_scale_is_named(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    stored = load_file(broken / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(KvliteError, match=r"layers\.1\.mlp\.experts\.down_proj\.scales is missing"):
        kvlite.load(str(broken))
