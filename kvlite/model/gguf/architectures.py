"""What llama.cpp's architectures are in transformers: an entry each, of what is its own.

Source: llama.cpp's converter and its `llama-model.cpp`; published configs for what files do not
store.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvlite.model.gguf import families
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
        keys: those of a config that are as the file has them, as of `Metadata.read`.
        fixed: those that are the same for all of its models.
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
    keys: str = ""
    fixed: Config = field(default_factory=dict)
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
_BY_HEAD = partial(families.grouped, dim=1)
_DELTA_ORDERS: dict[str, Ordered] = {
    ".linear_attn.in_proj_qkv.weight": families.grouped_values,
    ".linear_attn.conv1d.weight": families.grouped_values,
    ".linear_attn.in_proj_z.weight": families.grouped,
    ".linear_attn.in_proj_a.weight": _BY_HEAD,
    ".linear_attn.in_proj_b.weight": _BY_HEAD,
    ".linear_attn.A_log": _BY_HEAD,
    ".linear_attn.dt_bias": _BY_HEAD,
}
_DELTA_NET = (
    "linear_conv_kernel_dim=ssm.conv_kernel linear_key_head_dim=ssm.state_size "
    "linear_num_key_heads=ssm.group_count linear_num_value_heads=ssm.time_step_rank"
)
_SHARED_EXPERT = f"shared_expert_intermediate_size={families.SHARED_WIDTH}"
_QWEN_MOE: Config = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GRANITE = (  # multipliers of 1 are not stored
    "attention_multiplier~attention.scale:1 embedding_multiplier~embedding_scale:1 "
    "residual_multiplier~residual_scale:1 logits_scaling~logit_scale:1"
)
_SOFTCAP = "final_logit_softcapping~final_logit_softcapping:30"
_SPLIT_CHANNELS = frozenset({"rope.dimension_sections"})
_QWEN35 = GGUFArchitecture(
    "qwen3_5_text",
    keys=_DELTA_NET,
    rope=_PARTIAL_ROPE,
    more=families.delta_net,
    modules={".post_attention_layernorm": "post_attention_norm"},
    orders=_DELTA_ORDERS,
    columns={".linear_attn.out_proj.weight": families.grouped},
    norm_offset=1,
    harmless=_SPLIT_CHANNELS,
)
_QWEN35_MOE = replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    keys=f"{_DELTA_NET} {families.EXPERT_WIDTH} {_SHARED_EXPERT}",
    fixed=_QWEN_MOE,
)
_GPT_OSS = GGUFArchitecture(
    "gpt_oss",
    keys=f"intermediate_size=expert_feed_forward_length {families.WINDOW}",
    fixed={"attention_bias": True},
    more=partial(families.sliding, each=2),
    rope=families.gpt_oss_rope,
    transposed=(".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"),
)
_NEMOTRON = GGUFArchitecture(
    "nemotron_h",
    keys=(
        "mamba_num_heads=ssm.time_step_rank n_groups=ssm.group_count "
        "ssm_state_size=ssm.state_size conv_kernel=ssm.conv_kernel "
        "use_conv_bias?ssm_conv1d.bias mamba_proj_bias?ssm_in.bias mlp_bias?ffn_up.bias"
    ),
    more=families.nemotron,
    rope=None,
    # Rope has no part in it, though the converter may say something of it.
    harmless=frozenset({"rope.dimension_count", "rope.freq_base"}),
)

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        lambda file: "mixtral" if file.whole("expert_count", 0) else "llama",
        fixed={"sliding_window": None},
        permuted=True,
        # transformers has biases in all four projections, or in none.
        zero=(".self_attn.o_proj.bias",),
    ),
    "mistral3": GGUFArchitecture(
        lambda file: "ministral3" if file.has("attention.temperature_scale") else "mistral",
        fixed={"sliding_window": None},
        rope=families.mistral_rope,
        permuted=True,
    ),
    "qwen2": GGUFArchitecture("qwen2", fixed={"use_sliding_window": False}),
    "qwen3": GGUFArchitecture("qwen3", fixed={"use_sliding_window": False}),
    "qwen3moe": GGUFArchitecture("qwen3_moe", keys=families.EXPERT_WIDTH, fixed=_QWEN_MOE),
    "qwen3next": replace(
        _QWEN35_MOE,
        model_type="qwen3_next",
        orders={".linear_attn.in_proj_qkvz.weight": families.by_key_head},
        columns={},
        harmless=frozenset(),
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "gemma2": GGUFArchitecture(
        "gemma2",
        keys=f"{families.WINDOW}:4096",
        more=partial(families.gemma, each=2, largest=46),
        modules={**_POST_NORMS, ".pre_feedforward_layernorm": "ffn_norm"},
        norm_offset=1,
    ),
    "gemma3": GGUFArchitecture(
        "gemma3_text",
        keys=families.WINDOW,
        more=partial(families.gemma, each=6, largest=62),
        rope=families.gemma3_rope,
        modules=_POST_NORMS,
        norm_offset=1,
    ),
    "gemma3n": GGUFArchitecture(
        "gemma3n_text",
        keys=(
            f"{families.WINDOW} altup_num_inputs=altup.num_inputs "
            "altup_active_idx=altup.active_idx num_kv_shared_layers=attention.shared_kv_layers "
            f"hidden_size_per_layer_input=embedding_length_per_layer_input {_SOFTCAP}"
        ),
        fixed={"altup_coef_clip": 120.0},
        more=families.gemma3n,
        rope=families.gemma3_rope,
        modules=_POST_NORMS,
    ),
    "gemma4": GGUFArchitecture(
        "gemma4_text",
        keys=(
            f"{families.WINDOW} num_kv_shared_layers=attention.shared_kv_layers:0 "
            f"hidden_size_per_layer_input=embedding_length_per_layer_input:0 {_SOFTCAP}"
        ),
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
    "gpt-oss": replace(
        _GPT_OSS,
        modules={".post_attention_layernorm": "post_attention_norm"},
        orders={
            ".mlp.experts.gate_up_proj": lambda config: ("alternating", ()),
            ".mlp.experts.gate_up_proj_bias": lambda config: ("alternating", ()),
        },
    ),
    # Ollama's own conversion.
    "gptoss": replace(_GPT_OSS, modules={".self_attn.o_proj": "attn_out"}),
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
        keys="use_qk_norm?attn_q_norm.weight",
        fixed={"num_nextn_predict_layers": 0},
        more=lambda file, config: families.routed_experts(file, gating=2),
        modules={".post_attention_layernorm": "post_attention_norm"},
    ),
    "deepseek2": GGUFArchitecture(
        families.deepseek_type,
        keys="kv_lora_rank=attention.kv_lora_rank",
        fixed={"rope_interleave": True},
        more=families.deepseek,
        rope=families.deepseek_rope,
    ),
    "granite": GGUFArchitecture(
        "granite", keys=_GRANITE, more=families.granite_alone, permuted=True, harmless=_STATES
    ),
    "granitemoe": GGUFArchitecture(
        "granitemoe",
        keys=f"{_GRANITE} num_local_experts=expert_count num_experts_per_tok=expert_used_count",
        more=families.granite_moe,
        permuted=True,
    ),
    "granitehybrid": GGUFArchitecture(
        "granitemoehybrid",
        keys=(
            f"{_GRANITE} mamba_n_heads=ssm.time_step_rank mamba_d_state=ssm.state_size "
            "mamba_d_conv=ssm.conv_kernel mamba_n_groups=ssm.group_count "
            "mamba_conv_bias?ssm_conv1d.bias mamba_proj_bias?ssm_in.bias"
        ),
        more=families.granite_hybrid,
        permuted=True,
    ),
    "olmo2": GGUFArchitecture(
        lambda file: "olmo3" if file.has("attention.sliding_window") else "olmo2",
        more=families.olmo,
        rope=families.olmo_rope,
        modules=_POST_NORMS,
    ),
    "smollm3": GGUFArchitecture(
        "smollm3",
        fixed={"use_sliding_window": False},
        more=families.fourth_still,
        permuted=True,
    ),
    "exaone4": GGUFArchitecture("exaone4", more=families.exaone4, modules=_POST_NORMS),
    "seed_oss": GGUFArchitecture(
        "seed_oss", modules={".post_attention_layernorm": "post_attention_norm"}
    ),
    "hunyuan-dense": GGUFArchitecture("hunyuan_v1_dense"),
    "ernie4_5": GGUFArchitecture("ernie4_5"),
    "command-r": GGUFArchitecture(
        "cohere", keys="logit_scale~logit_scale use_qk_norm?attn_q_norm.weight"
    ),
    "cohere2": GGUFArchitecture(
        "cohere2",
        keys=f"logit_scale~logit_scale {families.WINDOW}",
        more=partial(families.sliding, each=4),
    ),
    "lfm2": GGUFArchitecture(
        "lfm2",
        keys=(
            "conv_L_cache=shortconv.l_cache conv_bias?shortconv.conv.bias "
            "norm_eps~attention.layer_norm_rms_epsilon"
        ),
        fixed={"block_auto_adjust_ff_dim": False},
        more=families.lfm2,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "llama4": GGUFArchitecture(
        "llama4_text",
        keys=(
            "intermediate_size_mlp=feed_forward_length "
            "intermediate_size=expert_feed_forward_length "
            "interleave_moe_layer_step=interleave_moe_layer_step:1"
        ),
        fixed={
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        more=families.llama4,
        transposed=(".feed_forward.experts.gate_up_proj", ".feed_forward.experts.down_proj"),
    ),
}
