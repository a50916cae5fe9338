"""A config.json: those that are published are taken, those of no model refused in one sentence."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvlite.errors import ModelError
from kvlite.model.architectures import ADMITTED
from kvlite.model.shape import read_config, read_shape
from tests.configs import PUBLISHED
from tests.conftest import ARCHITECTURES, SIZES

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as error:
        work()
    said = str(error.value)
    assert "\n" not in said and len(said) < 500
    assert said.isprintable()
    return said


def refusal(folder: Path) -> str:
    said = refused(lambda: read_config(folder))
    assert str(folder / "config.json") in said
    return said


def test_published_configs_are_taken_and_are_of_every_architecture(tmp_path: Path) -> None:
    for config in PUBLISHED.values():
        assert read_config(write(tmp_path, config)) == config
    assert {config["model_type"] for config in PUBLISHED.values()} == {*ADMITTED}


@pytest.mark.parametrize(
    ("name", "published"),
    [("gpt-oss-20b", (19.12, 0.64, 1.16, 20.91)), ("gpt-oss-120b", (114.71, 0.96, 1.16, 116.83))],
)
def test_parameters_are_those_of_the_model_card(
    name: str, published: tuple[float, ...], tmp_path: Path
) -> None:
    """Billions by kind: "gpt-oss-120b & gpt-oss-20b Model Card", Table 1."""
    found = read_shape(write(tmp_path, PUBLISHED[name])).parameters
    embeddings = found["embedding"] + found["head"]
    counted = found["mlp"], found["attention"], embeddings, sum(found.values())
    assert tuple(round(each / 1e9, 2) for each in counted) == published


@pytest.mark.parametrize(
    ("name", "layers", "recurrent", "billions", "within"),
    [
        ("gemma-3n-E4B-it, its text alone", 20, 0, 6.9, 0.01),
        ("gemma-4-E2B-it, its text alone", 15, 0, 4.6, 0.01),
        ("gemma-4-26B-A4B-it, its text alone", 30, 0, 25.2, 0.01),
        ("gemma-4-31B-it, its text alone", 60, 0, 30.7, 0.01),
        ("Qwen3-Next-80B-A3B-Instruct", 12, 36, 80, 0.08),
        ("Qwen3.5-27B, its text alone", 16, 48, 27, 0.08),
        ("Qwen3.5-35B-A3B, its text alone", 10, 30, 35, 0.08),
        ("LFM2-1.2B", 6, 10, 1.2, 0.08),
        ("GLM-4.5-Air", 46, 0, 106, 0.08),
        ("GLM-4.7-Flash", 47, 0, 30, 0.08),
        ("DeepSeek-V2-Lite", 27, 0, 15.7, 0.08),
        ("DeepSeek-V3, in bf16", 61, 0, 671, 0.08),
        ("NVIDIA-Nemotron-Nano-9B-v2", 4, 27, 8.9, 0.08),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 6, 23, 31.6, 0.08),
        ("granite-4.0-h-tiny", 4, 36, 7, 0.08),
        ("granite-4.0-h-micro", 4, 36, 3, 0.08),
    ],
)
def test_published_models_have_a_shape(
    name: str, layers: int, recurrent: int, billions: float, within: float, tmp_path: Path
) -> None:
    """With as many parameters as their model cards or names say, without what sees and hears; of
    layers those that have keys of their own."""
    shape = read_shape(write(tmp_path, PUBLISHED[name]))
    assert (shape.layers, shape.recurrent_layers) == (layers, recurrent)
    assert sum(shape.parameters.values()) == pytest.approx(billions * 1e9, rel=within)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_transformers_saves_is_taken(name: str, tmp_path: Path) -> None:
    kind, changes = ARCHITECTURES[name]
    config = getattr(transformers, kind)
    # The classes of Hunyuan and GLM have no head_dim unless they are given one, that of Granite no
    # attention, that of DeepSeek-V2 no experts for a token, and none can be run without.
    layers = ["full_attention", "linear_attention"]
    head_dim = {"head_dim": 128}
    given = {"hunyuan": head_dim, "glm4-moe": head_dim, "deepseek-v2": {"num_experts_per_tok": 6}}
    own = {**given, "granite-hybrid": {"layer_types": layers * 16}}.get(name, {})
    for options in (own, {**SIZES, **changes}):
        config(**options).save_pretrained(tmp_path)
        assert read_config(tmp_path)["model_type"] in ADMITTED


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("Llama-3.1-8B", key) for key in NEEDED),
        ("Mistral-7B-v0.3", "num_key_value_heads"),
        ("granite-3.3-8b-instruct", "attention_multiplier"),
        ("Hunyuan-7B-Instruct", "head_dim"),
        ("gemma-3n-E4B-it, its text alone", "altup_num_inputs"),
        ("gemma-4-E2B-it, its text alone", "num_kv_shared_layers"),
        ("gemma-4-31B-it, its text alone", "global_head_dim"),
        ("gemma-4-26B-A4B-it, its text alone", "num_experts"),
        ("c4ai-command-r7b", "logit_scale"),
        ("Mixtral-8x7B-v0.1", "num_local_experts"),
        ("GLM-4.5-Air", "first_k_dense_replace"),
        ("GLM-4.7-Flash", "kv_lora_rank"),
        ("gpt-oss-20b", "num_local_experts"),
        ("Qwen3-30B-A3B", "num_experts_per_tok"),
        ("Qwen3-Next-80B-A3B-Instruct", "linear_num_value_heads"),
        ("Qwen3-Next-80B-A3B-Instruct", "shared_expert_intermediate_size"),
    ],
)
def test_a_missing_size_is_named(name: str, key: str, tmp_path: Path) -> None:
    config = PUBLISHED[name]
    folder = write(tmp_path, {each: config[each] for each in config if each != key})
    assert f"config.json has no {key}" in refusal(folder)
    if key in NEEDED:
        assert f"{key} is null: it must be" in refusal(write(tmp_path, {**config, key: None}))


LLAMA, EXPERTS, GEMMA = "Llama-3.1-8B", "Qwen3-30B-A3B", "gemma-3-270m"
HYBRID = "Qwen3-Next-80B-A3B-Instruct"
SCOUT = "Llama-4-Scout-17B-16E, its text alone"
NEMOTRON = "NVIDIA-Nemotron-Nano-9B-v2"
PHI = "Phi-3.5-mini-instruct"
ROPE = PUBLISHED[LLAMA]["rope_scaling"]
IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("granite-3.3-8b-instruct", {"logits_scaling": 0}, "logits_scaling is 0"),
    ("gemma-4-E2B-it, its text alone", {"num_kv_shared_layers": -1}, "it must be from 0"),
    ("gemma-4-E2B-it, its text alone", {"global_head_dim": 0}, "global_head_dim"),
    ("gemma-4-E2B-it, its text alone", {"vocab_size_per_layer_input": -1}, "vocab_size_per_layer"),
    ("GLM-4.5-Air", {"n_group": 3}, "n_group is 3: it must divide n_routed_experts, which is 128"),
    ("GLM-4.5-Air", {"num_experts_per_tok": 129}, "there are 128 experts (n_routed_experts)"),
    (
        "Ministral-3-8B, its text alone",
        {"rope_parameters": {"rope_type": "default"}},
        "has no rope_parameters.llama_4_scaling_beta",
    ),
    (SCOUT, {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    (SCOUT, {"layer_types": ["sliding_attention"] * 48}, "is none of full_attention, chunked_att"),
    (HYBRID, {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
    (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    (LLAMA, {"hidden_size": 10**30}, "hidden_size is 1000"),
    (LLAMA, {"head_dim": -1}, "head_dim is -1"),
    (LLAMA, {"num_hidden_layers": 1_000_000}, "above 0, and at most 1,000"),
    (LLAMA, {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
    (LLAMA, {"vocab_size": float("nan")}, "vocab_size is NaN"),
    (LLAMA, {"rope_theta": float("inf")}, "rope_theta is Infinity"),
    (LLAMA, {"model_type": ["llama"]}, 'model_type is ["llama"]'),
    (LLAMA, {"rope_theta": 0}, "rope_theta is 0"),
    (LLAMA, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    (LLAMA, {"sliding_window": -4096}, "sliding_window is -4096"),
    (LLAMA, {"rope_scaling": {**ROPE, "factor": 0}}, "rope_scaling.factor is 0"),
    (EXPERTS, {"num_experts": 0}, "num_experts is 0"),
    (EXPERTS, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129: there are 128 experts"),
    (GEMMA, {"layer_types": ["linear_attention"] * 18}, '"linear_attention" is none of'),
]
# What no table has is left to transformers.
BUILT_BY_NOBODY: list[tuple[str, dict[str, Any]]] = [
    *(("gemma-4-E2B-it, its text alone", {"num_kv_shared_layers": each}) for each in (31, 35)),
    ("SmolLM3-3B", {"no_rope_layers": [1, 0]}),
    (HYBRID, {"linear_num_value_heads": 33}),
    (HYBRID, {"full_attention_interval": 49}),
    ("GLM-4.7-Flash", {"qk_rope_head_dim": 63}),
    (NEMOTRON, {"hybrid_override_pattern": "M-X" * 18 + "*-"}),
    (NEMOTRON, {"layers_block_type": ["mamba"] * 56}),
    (SCOUT, {"no_rope_layers": [1]}),
    (HYBRID, {"layer_types": ["linear_attention"] * 48}),
    (LLAMA, {"num_key_value_heads": 5}),
    (LLAMA, {"hidden_size": 4100}),
    (LLAMA, {"hidden_act": "abra"}),
    (LLAMA, {"tie_word_embeddings": "yes"}),
    (LLAMA, {"torch_dtype": "float99"}),
    (LLAMA, {"pad_token_id": 128256}),
    (LLAMA, {"num_attention_heads": "32"}),
    (LLAMA, {"hidden_size": "wide"}),
    (LLAMA, {"rms_norm_eps": "small"}),
    ("gemma-4-E2B-it, its text alone", {"vocab_size_per_layer_input": "all"}),
    (LLAMA, {"rope_scaling": "linear"}),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}),
    (LLAMA, {"rope_scaling": {**ROPE, "high_freq_factor": None}}),
    (PHI, {"rope_scaling": {"type": "longrope"}}),
    (PHI, {"rope_scaling": {"type": "longrope", "short_factor": 1, "long_factor": [1]}}),
    (PHI, {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1, 0]}}),
    (LLAMA, {"quantization_config": True}),
    (LLAMA, {"eos_token_id": [2, "x"]}),
    (LLAMA, {"bos_token_id": True}),
    (LLAMA, {"text_config": 3}),
    (EXPERTS, {"decoder_sparse_step": 0}),
    (EXPERTS, {"mlp_only_layers": 3}),
    (GEMMA, {"layer_types": ["full_attention"]}),
    (GEMMA, {"rope_parameters": {"full_attention": 5}}),
]


@pytest.mark.parametrize(("name", "changes", "reason"), IMPOSSIBLE)
def test_values_that_no_model_has_are_refused(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert reason in refusal(write(tmp_path, {**PUBLISHED[name], **changes}))


@pytest.mark.parametrize(("name", "changes"), BUILT_BY_NOBODY)
def test_what_transformers_cannot_build_is_refused(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, {**PUBLISHED[name], **changes})
    assert str(tmp_path) in refused(lambda: read_shape(tmp_path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        (f'{{"vocab_size": {"9" * 5000}}}', "not readable JSON"),
        ("\x1b[31m", "not readable JSON"),
        ("5", "not a JSON object"),
        ("{}", "has no model_type"),
    ],
)
def test_text_that_is_no_config_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    assert reason in refusal(write(tmp_path, text))


def test_a_config_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100 << 20)
    assert "104,857,600 bytes long" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "not a file" in refusal(tmp_path)


def test_a_config_is_refused_without_torch(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama"})
    code = (
        "import sys; sys.argv = ['kvlite', 'plan', sys.argv[1]]\n"
        "from kvlite.cli.main import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "has no hidden_size" in ran.stderr and ran.stderr.count("\n") == 1
    assert ran.stdout == "False\n"
