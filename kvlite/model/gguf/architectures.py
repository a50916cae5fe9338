"""What llama.cpp's architectures are in transformers: an entry each, of what is its own.

Source: llama.cpp's converter and its `llama-model.cpp`; published configs for what files do not
store.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvlite.model.gguf import families, hybrids
from kvlite.model.gguf.families import Config
from kvlite.model.gguf.metadata import Metadata

# How rows are put back: a function of `model.gguf.undo`, and what it takes, given the config.
Order = tuple[str, Callable[[Config], tuple[int, ...]]]


@dataclass(frozen=True)
class GGUFArchitecture:
    """What is particular to one.

    Attributes:
        model_type: transformers' name, or what gives it.
        keys: keys of the config beside those that all have, and where the file has them.
        more: further keys, given the file and the config so far.
        modules: names that differ from those of others (`model.gguf.names`).
        orders: rows that are in another order, by transformers' names.
        columns: likewise columns.
        permuted: whether rows of queries and keys are in the order of neighboring channels.
        norm_offset: what was added to norms.
        has_rope: whether positions are rotary.
        partial: whether a part of a head may be rotated.
        transposed: parameters of experts that transformers has the other way round.
        harmless: keys that change nothing.
    """

    model_type: str | Callable[[Metadata], str]
    keys: dict[str, str] = field(default_factory=dict)
    more: Callable[[Metadata, Config], Config] = lambda file, config: {}
    modules: dict[str, str] = field(default_factory=dict)
    orders: dict[str, Order] = field(default_factory=dict)
    columns: dict[str, Order] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: int = 0
    has_rope: bool = True
    partial: bool = False
    transposed: tuple[str, ...] = ()
    harmless: frozenset[str] = frozenset()

    def name(self, file: Metadata) -> str:
        """transformers' name of a file's architecture."""
        return self.model_type if isinstance(self.model_type, str) else self.model_type(file)


# What hybrids without recurrent layers say all the same.
_STATES = frozenset(
    f"ssm.{key}"
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)
_POST_NORMS = {
    ".post_attention_layernorm": "post_attention_norm",
    ".post_feedforward_layernorm": "post_ffw_norm",
}
_DELTA_ORDERS: dict[str, Order] = {
    ".linear_attn.in_proj_qkv.weight": ("grouped", hybrids.value_rows),
    ".linear_attn.conv1d.weight": ("grouped", hybrids.value_rows),
    ".linear_attn.in_proj_z.weight": ("grouped", lambda config: (0, *hybrids.values(config))),
    ".linear_attn.in_proj_a.weight": ("grouped", lambda config: (0, *hybrids.values(config, 1))),
    ".linear_attn.in_proj_b.weight": ("grouped", lambda config: (0, *hybrids.values(config, 1))),
    ".linear_attn.A_log": ("grouped", lambda config: (0, *hybrids.values(config, 1))),
    ".linear_attn.dt_bias": ("grouped", lambda config: (0, *hybrids.values(config, 1))),
}
_SPLIT_CHANNELS = frozenset({"rope.dimension_sections"})
_QWEN35 = GGUFArchitecture(
    "qwen3_5_text",
    partial=True,
    more=hybrids.delta_net,
    modules={".post_attention_layernorm": "post_attention_norm"},
    orders=_DELTA_ORDERS,
    columns={
        ".linear_attn.out_proj.weight": ("grouped", lambda config: (0, *hybrids.values(config)))
    },
    norm_offset=1,
    harmless=_SPLIT_CHANNELS,
)


def _by_key_head(config: Config) -> tuple[int, ...]:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return (
        keys,
        config["linear_key_head_dim"],
        values // keys * config["linear_value_head_dim"],
    )


_GPT_OSS_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_NEMOTRON = GGUFArchitecture(
    "nemotron_h",
    more=hybrids.nemotron,
    has_rope=False,
    # Rope has no part in it, though the converter may say something of it.
    harmless=frozenset({"rope.dimension_count", "rope.freq_base"}),
)

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(families.llama_type, more=families.llama, permuted=True),
    "mistral3": GGUFArchitecture(families.mistral_type, more=families.mistral, permuted=True),
    "qwen2": GGUFArchitecture("qwen2", more=lambda file, config: {"use_sliding_window": False}),
    "qwen3": GGUFArchitecture("qwen3", more=lambda file, config: {"use_sliding_window": False}),
    "qwen3moe": GGUFArchitecture("qwen3_moe", more=families.qwen3_moe),
    "qwen3next": GGUFArchitecture(
        "qwen3_next",
        partial=True,
        more=hybrids.delta_net,
        modules={".post_attention_layernorm": "post_attention_norm"},
        orders={".linear_attn.in_proj_qkvz.weight": ("by_key_head", _by_key_head)},
        norm_offset=1,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": GGUFArchitecture(**{**vars(_QWEN35), "model_type": "qwen3_5_moe_text"}),
    "gemma2": GGUFArchitecture(
        "gemma2",
        more=families.gemma2,
        modules={
            **_POST_NORMS,
            ".pre_feedforward_layernorm": "ffn_norm",
        },
        norm_offset=1,
    ),
    "gemma3": GGUFArchitecture(
        "gemma3_text", more=families.gemma3, modules=_POST_NORMS, norm_offset=1
    ),
    "gemma3n": GGUFArchitecture("gemma3n_text", more=families.gemma3n, modules=_POST_NORMS),
    "gemma4": GGUFArchitecture(
        "gemma4_text",
        more=families.gemma4,
        modules={
            **_POST_NORMS,
            ".pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            ".post_feedforward_layernorm_1": "post_ffw_norm_1",
            ".post_feedforward_layernorm_2": "post_ffw_norm_2",
        },
        harmless=frozenset({"attention.value_length_swa"}),
    ),
    "phi3": GGUFArchitecture("phi3", more=families.phi3, partial=True),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        more=families.gpt_oss,
        modules={".post_attention_layernorm": "post_attention_norm"},
        orders={
            ".mlp.experts.gate_up_proj": ("alternating", lambda config: ()),
            ".mlp.experts.gate_up_proj_bias": ("alternating", lambda config: ()),
        },
        transposed=_GPT_OSS_EXPERTS,
    ),
    # Ollama's own conversion.
    "gptoss": GGUFArchitecture(
        "gpt_oss",
        more=families.gpt_oss,
        modules={".self_attn.o_proj": "attn_out"},
        transposed=_GPT_OSS_EXPERTS,
    ),
    "glm4": GGUFArchitecture(
        "glm4",
        partial=True,
        modules={
            ".post_self_attn_layernorm": "post_attention_norm",
            ".post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "glm4moe": GGUFArchitecture(
        "glm4_moe",
        partial=True,
        more=families.glm4_moe,
        modules={".post_attention_layernorm": "post_attention_norm"},
    ),
    "deepseek2": GGUFArchitecture(families.deepseek_type, more=families.deepseek, partial=True),
    "granite": GGUFArchitecture(
        "granite", more=hybrids.granite_alone, permuted=True, harmless=_STATES
    ),
    "granitemoe": GGUFArchitecture("granitemoe", more=families.granite_moe, permuted=True),
    "granitehybrid": GGUFArchitecture(
        "granitemoehybrid", more=hybrids.granite_hybrid, permuted=True
    ),
    "olmo2": GGUFArchitecture(families.olmo_type, more=families.olmo, modules=_POST_NORMS),
    "smollm3": GGUFArchitecture("smollm3", more=families.smollm3, permuted=True),
    "exaone4": GGUFArchitecture("exaone4", more=families.exaone4, modules=_POST_NORMS),
    "seed_oss": GGUFArchitecture(
        "seed_oss", modules={".post_attention_layernorm": "post_attention_norm"}
    ),
    "hunyuan-dense": GGUFArchitecture("hunyuan_v1_dense"),
    "ernie4_5": GGUFArchitecture("ernie4_5"),
    "command-r": GGUFArchitecture(
        "cohere",
        keys={"logit_scale": "logit_scale"},
        more=lambda file, config: {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors},
    ),
    "cohere2": GGUFArchitecture(
        "cohere2", keys={"logit_scale": "logit_scale"}, more=families.cohere2
    ),
    "lfm2": GGUFArchitecture("lfm2", more=hybrids.lfm2),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "llama4": GGUFArchitecture(
        "llama4_text",
        more=families.llama4,
        transposed=(".feed_forward.experts.gate_up_proj", ".feed_forward.experts.down_proj"),
    ),
}
