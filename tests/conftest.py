"""Shared models: tiny random ones of every architecture, and the embedded one."""

import gc
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Tests convert the embedded model once, into a cache of their own.
CACHE = Path(__file__).parent / ".cache"
os.environ["KVLITE_CACHE"] = str(CACHE)

import hypothesis
import pytest
import torch
import transformers

import kvlite
from kvlite.bench.prose import bundled_prose
from kvlite.config.environment import PROFILE, variable_of
from kvlite.config.settings import OPTIONS
from kvlite.model.attention_interface import ATTENTION, register_attention
from kvlite.model.calibration import Calibration
from kvlite.model.load import LoadedModel
from kvlite.model.shape import ModelShape, shape_of
from kvlite.model.source import gguf_file
from kvlite.model.weights import PLAIN, Weights
from tests.foreign import Foreign
from tests.hub import Hub

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": 24}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, **SLIDING}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
SHARED = {"shared_expert_intermediate_size": 24}
LATENTS = {
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **options}
    return {"rope_parameters": rope}


# Layers that see everything have other heads than those with a window.
TWO_SIZES = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
# Four layers with keys, and others behind them without.
LENDING = {
    "layer_types": [*ALTERNATING["layer_types"], *ALTERNATING["layer_types"]],
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    **SLIDING,
}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199}
# Four layers with attention, and others before, between and behind them.
DELTA_NETS = {
    "layer_types": [
        *("linear_attention", "linear_attention", "full_attention", "full_attention"),
        *("linear_attention", "full_attention", "full_attention", "linear_attention"),
    ],
    "num_hidden_layers": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **_rope("default", partial_rotary_factor=0.5),
}
CONVOLUTIONS = {
    "layer_types": [
        "conv" if "linear" in kind else kind for kind in map(str, DELTA_NETS["layer_types"])
    ],
    "num_hidden_layers": 8,
}
LLAMA3 = _rope(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)
LONGROPE = _rope(
    "longrope",
    short_factor=[1.0] * 8,
    long_factor=[2.0] * 8,
    original_max_position_embeddings=32,
)

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-rope-llama3": ("LlamaConfig", LLAMA3),
    "llama-rope-yarn": ("LlamaConfig", _rope("yarn", original_max_position_embeddings=128)),
    "llama-rope-linear": ("LlamaConfig", _rope("linear")),
    "llama-rope-dynamic": ("LlamaConfig", _rope("dynamic")),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", SLIDING),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", {"use_sliding_window": True, **ALTERNATING}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {**GEMMA, **ALTERNATING}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, **ALTERNATING}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **LENDING,
            **PER_LAYER,
            "head_dim": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, *[0.0] * 7],
        },
    ),
    "gemma4": ("Gemma4TextConfig", {**ALTERNATING, **TWO_SIZES, "hidden_size_per_layer_input": 0}),
    "gemma4-moe": (
        "Gemma4TextConfig",
        {
            **ALTERNATING,
            **TWO_SIZES,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4-e": (
        "Gemma4TextConfig",
        {
            **LENDING,
            **PER_LAYER,
            "head_dim": 16,
            "global_head_dim": 32,
            "use_double_wide_mlp": True,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-sliding": ("Phi3Config", SLIDING),
    "phi3-partial": (
        "Phi3Config",
        {"sliding_window": None, **_rope("default", partial_rotary_factor=0.5)},
    ),
    "phi3-longrope": (
        "Phi3Config",
        {"sliding_window": None, "original_max_position_embeddings": 32, **LONGROPE},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, **EXPERTS}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.5,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
        },
    ),
    "olmo3": ("Olmo3Config", ALTERNATING),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1, 0]}),
    "exaone4": ("Exaone4Config", ALTERNATING),
    "seed-oss": ("SeedOssConfig", {"head_dim": 32}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "cohere2": ("Cohere2Config", {**ALTERNATING, "logit_scale": 0.25}),
    "ernie4-5": ("Ernie4_5Config", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            **LATENTS,
            **_rope("yarn", original_max_position_embeddings=128, mscale=1.0, mscale_all_dim=1.0),
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        {**LATENTS, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteConfig",
        {**LATENTS, "num_key_value_heads": 4, "q_lora_rank": None},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            **_rope("yarn", original_max_position_embeddings=128, llama_4_scaling_beta=0.5),
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **ALTERNATING,
            **_rope("yarn", original_max_position_embeddings=128, truncate=False),
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", {"head_dim": 16, **DELTA_NETS, **EXPERTS, **SHARED}),
    "qwen3-5": ("Qwen3_5TextConfig", {"head_dim": 16, **DELTA_NETS}),
    "qwen3-5-moe": (
        "Qwen3_5MoeTextConfig",
        {"head_dim": 16, **DELTA_NETS, **EXPERTS, **SHARED},
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": DELTA_NETS["layer_types"],
            "num_hidden_layers": 8,
            "attention_multiplier": 0.5,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
            "initializer_range": 0.3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "full_attention", "full_attention", "moe"),
                *("linear_attention", "moe", "full_attention", "mlp", "full_attention"),
                *("moe", "linear_attention"),
            ],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 24,
            "initializer_range": 0.05,
        },
    ),
    "lfm2": ("Lfm2Config", {**CONVOLUTIONS, "conv_L_cache": 3, "block_multiple_of": 32}),
}


# What transformers calls the parts of a decoder layer, and the kinds of layers that are one.
PARTS = {
    "attention": ["self_attn", "full_attention"],
    "recurrent": ["linear_attn", "conv", "mamba", "linear_attention"],
    "mlp": [
        *("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "moe", "experts", "router"),
        *("altup", "laurel", "per_layer_input_gate", "per_layer_projection"),
    ],
}

# One of every kind of attention and of what is kept: what stands on the engine need not go through
# all that are admitted.
KINDS = [
    *("llama", "mistral-sliding", "gemma2", "gemma3n", "gemma4", "llama4", "phi3-longrope"),
    *("smollm3", "hunyuan", "cohere2", "deepseek-v3", "gpt-oss", "qwen3-next", "lfm2"),
    "nemotron-h",
]

# Models with recurrent layers.
HYBRIDS = ["qwen3-next", "qwen3-5", "qwen3-5-moe", "lfm2", "granite-hybrid", "nemotron-h"]


def parts_of(layer: Any, group: str) -> list[Any]:
    """The modules of a decoder layer that are of a group of `PARTS`."""
    alone = {getattr(layer, "block_type", ""): getattr(layer, "mixer", None)}
    found = [alone.get(name) or getattr(layer, name, None) for name in PARTS[group]]
    return [each for each in found if each is not None]


class IntegerTokenizer:
    """Text is numbers with spaces between, words stand for how long they are; enough to stream
    from a random model."""

    chat_template = None
    eos_token_id = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) if word.isdigit() else 3 + len(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"{i} " for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(199)}


@dataclass(frozen=True)
class Tiny:
    """A random model twice: as transformers runs it, and as kvlite does."""

    reference: Any
    model: LoadedModel


def made_up_calibration(shape: ModelShape) -> Calibration:
    """Ranks with three groups of layers, and heads that rank as they are numbered."""
    ranks = [9.0, 7.0, 7.5, 5.0, *[5.5] * shape.layers][: shape.layers]
    return Calibration(
        model="tiny",
        fingerprint="0",
        text="none",
        samples=1,
        tokens=1,
        max_context=shape.max_context,
        layer_ranks=tuple(ranks),
        elbow=4,
        head_ranks=((5.0,) * shape.kv_heads,) * shape.layers,
        head_wins=((1,) + (0,) * (shape.kv_heads - 1),) * shape.layers,
        lazy_shares=(0.5,) * shape.layers,
        lazy_threshold=0.9,
    )


def make_tiny(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: Any
) -> Tiny:
    register_attention()
    kind, changes = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**{**SIZES, **changes, **sizes})
    auto = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    reference = auto.from_config(deepcopy(config), attn_implementation="eager")
    for buffer_name, buffer in reference.named_buffers():
        if buffer_name.endswith("correction_bias"):  # of zeros nothing is seen
            buffer.normal_(std=0.2)
    module = auto.from_config(deepcopy(config), attn_implementation=ATTENTION)
    module.load_state_dict(reference.state_dict())
    for each in (reference, module):
        each.eval().to(device, dtype)
    # .to(dtype) also rounds the rotary frequencies, which must stay float32.
    for each in (reference, module):
        if getattr(each.model, "rotary_emb", None) is not None:
            each.model.rotary_emb.to(torch.float32)
    model = LoadedModel(
        module,
        IntegerTokenizer(),
        shape_of(config),
        Path(),
        Weights(next(name for name in PLAIN if PLAIN[name] == dtype), dtype),
        stop_ids=frozenset({2}),
        calibration=made_up_calibration(shape_of(config)),
    )
    return Tiny(reference, model)


# A machine that does other things is slow now and then, which is no failure.
hypothesis.settings.register_profile(
    "kvlite",
    deadline=None,
    # What chance finds should not stop a change that has nothing to do with it.
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvlite")


@pytest.fixture(scope="session", autouse=True)
def nobodys_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Neither profiles nor the environment of whoever runs the tests decide anything in them."""
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLITE_CONFIG", str(folder))
        others = ("KVLITE_SERVER", "KVLITE_API_KEY", "OPENAI_API_KEY")
        for variable in (PROFILE, *map(variable_of, OPTIONS), *others):
            patch.delenv(variable, raising=False)
        yield folder


@pytest.fixture(autouse=True)
def threads() -> None:
    """Tiny models are fastest on one thread, and other tests run beside the embedded one's."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """gc looks only at what a module's tests make: libraries hold a million objects."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries complain of what is left when Python ends."""
    gc.unfreeze()


@pytest.fixture(scope="session", params=sorted(ARCHITECTURES))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    """Every admitted architecture in turn."""
    return make_tiny(request.param)


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Tiny:
    """An architecture of every kind in turn."""
    return make_tiny(request.param)


@pytest.fixture(scope="session")
def llama() -> Tiny:
    """One tiny Llama."""
    return make_tiny("llama")


@pytest.fixture(scope="session")
def smollm() -> kvlite.Runner:
    """The embedded model, with weights as transformers has them."""
    return kvlite.load("smollm2-135m", weights="fp32")


@pytest.fixture(scope="session")
def smollm_reference(smollm: kvlite.Runner) -> Any:
    """The embedded model as transformers reads and runs it."""
    file = gguf_file("smollm2-135m")
    assert file is not None
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="session")
def smollm_folder(
    smollm: kvlite.Runner, smollm_reference: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The embedded model as a folder of safetensors."""
    folder = tmp_path_factory.mktemp("models") / "smollm"
    # transformers refuses to save what it believes is still quantized.
    smollm_reference.hf_quantizer = None
    if hasattr(smollm_reference.config, "quantization_config"):
        del smollm_reference.config.quantization_config
    smollm_reference.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm.model_path / name, folder)
    return folder


@pytest.fixture(scope="session")
def prose(smollm: kvlite.Runner) -> list[int]:
    """Token ids of some 10,000 tokens of real prose."""
    ids: list[int] = smollm.tokenizer.encode(bundled_prose())
    return ids


@pytest.fixture(scope="session")
def tiny_folder(smollm: kvlite.Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama, its embedding tied, and the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 49_152, "tie_word_embeddings": True, "initializer_range": 0.3}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm.model_path / name, folder)
    return folder


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the model of `tiny_folder` as `a/b`, and an empty cache."""
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    hub = Hub({name: (tiny_folder / name).read_bytes() for name in names})
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    yield hub
    hub.over.set()
    hub.shutdown()
    hub.server_close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with `cases(n)`, leave n cases to `make test`; the rest are long. With
    `cases(n, most)`, those beyond `most` are exhaustive, too."""
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("cases"):
            name = item.nodeid.partition("[")[0]
            products.setdefault(name, []).append(item)
    for each in products.values():
        marker = each[0].get_closest_marker("cases")
        assert marker is not None
        count, *most = marker.args
        varied = most_varied([values_of(item) for item in each], count, *most)
        for number, item in enumerate(each):
            if number not in varied[:count]:
                item.add_marker(pytest.mark.long)
            if most and number not in varied:
                item.add_marker(pytest.mark.exhaustive)


def values_of(item: pytest.Function) -> list[tuple[str, str]]:
    """The value of each parameter of a case, as text."""
    return sorted((name, repr(value)) for name, value in item.callspec.params.items())


def most_varied(cases: list[list[tuple[str, str]]], count: int, most: int = 0) -> list[int]:
    """The numbers of `count` cases that show, together, most values, and then most pairs; behind
    them, up to `most`, those whose values were shown least."""
    chosen: list[int] = []
    left = dict.fromkeys(range(len(cases)))
    seen: Counter[Any] = Counter()

    def new(number: int) -> tuple[int, int, int]:
        values = cases[number]
        shown = sum(seen[each] for each in values) if len(chosen) >= count else 0
        pairs = sum(not seen[pair] for pair in combinations(values, 2))
        return sum(not seen[each] for each in values), pairs, -shown

    while left and len(chosen) < max(count, most):
        best = max(left, key=new)
        del left[best]
        chosen.append(best)
        seen.update([*cases[best], *combinations(cases[best], 2)])
    return chosen


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    with Foreign() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()
