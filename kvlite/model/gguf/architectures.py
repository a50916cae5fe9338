"""What llama.cpp's architectures are in transformers: an entry each, of what is its own.

Source: llama.cpp's converter and its `llama-model.cpp`; published configs for what files do not
store.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvlite.model.gguf import families, hybrids
from kvlite.model.gguf.families import Config
from kvlite.model.gguf.index import Order
from kvlite.model.gguf.metadata import Metadata
from kvlite.model.gguf.rope import rope_parameters

# How rows are put back, given the config; None if they are where they belong.
Ordered = Callable[[Config], Order | None]


@dataclass(frozen=True)
class GGUFArchitecture:
    """What is particular to one.

    Attributes:
        model_type: transformers' name, or what gives it.
        more: further keys, given the file and the config so far.
        modules: names that differ from those of others (`model.gguf.names`).
        orders: rows that are in another order, by transformers' names.
        columns: likewise columns.
        permuted: whether rows of queries and keys are in the order of neighboring channels.
        norm_offset: what was added to norms.
        rope: `rope_parameters`, given the file and the config so far; None if positions are not
            rotary.
        transposed: parameters of experts that transformers has the other way round.
        zero: parameters that are zero where the file has none.
        harmless: keys that change nothing.
    """

    model_type: str | Callable[[Metadata], str]
    more: Callable[[Metadata, Config], Config] = lambda file, config: {}
    modules: dict[str, str] = field(default_factory=dict)
    orders: dict[str, Ordered] = field(default_factory=dict)
    columns: dict[str, Ordered] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: int = 0
    rope: Callable[[Metadata, Config], Config] | None = rope_parameters
    transposed: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    harmless: frozenset[str] = frozenset()

    def name(self, file: Metadata) -> str:
        """transformers' name of a file's architecture."""
        return self.model_type if isinstance(self.model_type, str) else self.model_type(file)


_PARTIAL_ROPE = partial(rope_parameters, partial=True)
# What hybrids without recurrent layers say all the same.
_STATES = frozenset(
    f"ssm.{key}"
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)
_POST_NORMS = {
    ".post_attention_layernorm": "post_attention_norm",
    ".post_feedforward_layernorm": "post_ffw_norm",
}
_BY_HEAD = partial(hybrids.grouped, dim=1)
_DELTA_ORDERS: dict[str, Ordered] = {
    ".linear_attn.in_proj_qkv.weight": hybrids.grouped_values,
    ".linear_attn.conv1d.weight": hybrids.grouped_values,
    ".linear_attn.in_proj_z.weight": hybrids.grouped,
    ".linear_attn.in_proj_a.weight": _BY_HEAD,
    ".linear_attn.in_proj_b.weight": _BY_HEAD,
    ".linear_attn.A_log": _BY_HEAD,
    ".linear_attn.dt_bias": _BY_HEAD,
}
_SPLIT_CHANNELS = frozenset({"rope.dimension_sections"})
_QWEN35 = GGUFArchitecture(
    "qwen3_5_text",
    rope=_PARTIAL_ROPE,
    more=hybrids.delta_net,
    modules={".post_attention_layernorm": "post_attention_norm"},
    orders=_DELTA_ORDERS,
    columns={".linear_attn.out_proj.weight": hybrids.grouped},
    norm_offset=1,
    harmless=_SPLIT_CHANNELS,
)


_GPT_OSS_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_NEMOTRON = GGUFArchitecture(
    "nemotron_h",
    more=hybrids.nemotron,
    rope=None,
    # Rope has no part in it, though the converter may say something of it.
    harmless=frozenset({"rope.dimension_count", "rope.freq_base"}),
)

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        lambda file: "mixtral" if file.whole("expert_count", 0) else "llama",
        more=lambda file, config: {"sliding_window": None},
        permuted=True,
        # transformers has biases in all four projections, or in none.
        zero=(".self_attn.o_proj.bias",),
    ),
    "mistral3": GGUFArchitecture(
        lambda file: "ministral3" if file.has("attention.temperature_scale") else "mistral",
        more=lambda file, config: {"sliding_window": None},
        rope=families.mistral_rope,
        permuted=True,
    ),
    "qwen2": GGUFArchitecture("qwen2", more=lambda file, config: {"use_sliding_window": False}),
    "qwen3": GGUFArchitecture("qwen3", more=lambda file, config: {"use_sliding_window": False}),
    "qwen3moe": GGUFArchitecture("qwen3_moe", more=families.qwen3_moe),
    "qwen3next": GGUFArchitecture(
        "qwen3_next",
        rope=_PARTIAL_ROPE,
        more=hybrids.delta_net,
        modules={".post_attention_layernorm": "post_attention_norm"},
        orders={".linear_attn.in_proj_qkvz.weight": hybrids.by_key_head},
        norm_offset=1,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": GGUFArchitecture(**{**vars(_QWEN35), "model_type": "qwen3_5_moe_text"}),
    "gemma2": GGUFArchitecture(
        "gemma2",
        more=families.gemma2,
        modules={**_POST_NORMS, ".pre_feedforward_layernorm": "ffn_norm"},
        norm_offset=1,
    ),
    "gemma3": GGUFArchitecture(
        "gemma3_text",
        more=families.gemma3,
        rope=families.gemma3_rope,
        modules=_POST_NORMS,
        norm_offset=1,
    ),
    "gemma3n": GGUFArchitecture(
        "gemma3n_text", more=families.gemma3n, rope=families.gemma3_rope, modules=_POST_NORMS
    ),
    "gemma4": GGUFArchitecture(
        "gemma4_text",
        more=families.gemma4,
        rope=families.gemma4_rope,
        modules={
            **_POST_NORMS,
            ".pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            ".post_feedforward_layernorm_1": "post_ffw_norm_1",
            ".post_feedforward_layernorm_2": "post_ffw_norm_2",
        },
        harmless=frozenset({"attention.value_length_swa"}),
    ),
    "phi3": GGUFArchitecture("phi3", more=families.phi3, rope=_PARTIAL_ROPE),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        more=families.gpt_oss,
        rope=families.gpt_oss_rope,
        modules={".post_attention_layernorm": "post_attention_norm"},
        orders={
            ".mlp.experts.gate_up_proj": lambda config: ("alternating", ()),
            ".mlp.experts.gate_up_proj_bias": lambda config: ("alternating", ()),
        },
        transposed=_GPT_OSS_EXPERTS,
    ),
    # Ollama's own conversion.
    "gptoss": GGUFArchitecture(
        "gpt_oss",
        more=families.gpt_oss,
        rope=families.gpt_oss_rope,
        modules={".self_attn.o_proj": "attn_out"},
        transposed=_GPT_OSS_EXPERTS,
    ),
    "glm4": GGUFArchitecture(
        "glm4",
        rope=_PARTIAL_ROPE,
        modules={
            ".post_self_attn_layernorm": "post_attention_norm",
            ".post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "glm4moe": GGUFArchitecture(
        "glm4_moe",
        rope=_PARTIAL_ROPE,
        more=families.glm4_moe,
        modules={".post_attention_layernorm": "post_attention_norm"},
    ),
    "deepseek2": GGUFArchitecture(
        families.deepseek_type, more=families.deepseek, rope=families.deepseek_rope
    ),
    "granite": GGUFArchitecture(
        "granite", more=hybrids.granite_alone, permuted=True, harmless=_STATES
    ),
    "granitemoe": GGUFArchitecture("granitemoe", more=families.granite_moe, permuted=True),
    "granitehybrid": GGUFArchitecture(
        "granitemoehybrid", more=hybrids.granite_hybrid, permuted=True
    ),
    "olmo2": GGUFArchitecture(
        lambda file: "olmo3" if file.has("attention.sliding_window") else "olmo2",
        more=families.olmo,
        rope=families.olmo_rope,
        modules=_POST_NORMS,
    ),
    "smollm3": GGUFArchitecture("smollm3", more=families.smollm3, permuted=True),
    "exaone4": GGUFArchitecture("exaone4", more=families.exaone4, modules=_POST_NORMS),
    "seed_oss": GGUFArchitecture(
        "seed_oss", modules={".post_attention_layernorm": "post_attention_norm"}
    ),
    "hunyuan-dense": GGUFArchitecture("hunyuan_v1_dense"),
    "ernie4_5": GGUFArchitecture("ernie4_5"),
    "command-r": GGUFArchitecture(
        "cohere",
        more=lambda file, config: {
            "logit_scale": file.number("logit_scale"),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        },
    ),
    "cohere2": GGUFArchitecture("cohere2", more=families.cohere2),
    "lfm2": GGUFArchitecture("lfm2", more=hybrids.lfm2),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "llama4": GGUFArchitecture(
        "llama4_text",
        more=families.llama4,
        transposed=(".feed_forward.experts.gate_up_proj", ".feed_forward.experts.down_proj"),
    ),
}
