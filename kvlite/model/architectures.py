"""The architectures that are admitted, and what their configs do not say in words that others use.

Multipliers, windows and sizes are read off the config; what is here cannot be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """What is particular to one.

    Attributes:
        needs: keys of its config that a plan depends on, besides those that all need, with spaces
            between; those of an object in it behind a dot.
        rotates: whether a layer rotates queries and keys, given transformers' config and its index.
        unturnable: why queries and keys cannot be turned to other positions, if they cannot.
        experts: the key of its config that says how many experts a layer has; empty without any.
        neighbors: it rotates neighboring channels, not the halves of a head.
        angles: how its rotary tables have the angles: "halves", for both halves of a head, "once",
            "pairs", each twice in a row, or "complex", each once, as a complex number.
        latent: its attention is over latents (`model.latents`).
        recurrent: kinds of layers that keep a state of fixed size, or nothing; transformers' names.
        layout: the key that says which layers those are, where the config has no layer_types.
        attention: what a layer calls its attention.
        attention_norm: what norms the input of attention, where there are recurrent layers.
        final_norm: what norms the output of the last layer.
        width: the key that says how wide an MLP or an expert is.
        known_as: keys, and what else its class goes by where a config has that.
        dense: whether a model has no experts at all, given what is in its config.
        needs_unless: pairs of keys; the first is needed where there is no second.
        carries: whether more goes from layer to layer than a hidden state (`model.gemma`).
        mtp: the key of its config that says how many layers a checkpoint has that tell tokens after
            the next (`model.mtp`), where those can be used.
        chunked: whether layers that do not see everything see chunks: what lies between multiples
            of a number of tokens, not the last so many (`model.llama4`).
    """

    needs: str = "num_key_value_heads"
    rotates: Callable[[Any, int], bool] = lambda config, layer: True
    unturnable: str = ""
    experts: str = ""
    neighbors: bool = False
    angles: str = "halves"
    latent: bool = False
    recurrent: tuple[str, ...] = ()
    layout: str = "full_attention_interval"
    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    final_norm: str = "norm"
    width: str = "intermediate_size"
    known_as: tuple[tuple[str, str], ...] = ()
    dense: Callable[[Mapping[str, Any]], bool] = lambda config: False
    needs_unless: tuple[tuple[str, str], ...] = ()
    carries: bool = False
    mtp: str = ""
    chunked: bool = False

    @property
    def short_sight(self) -> tuple[str, str]:
        """transformers' name of layers that do not see everything, and the key of how much they
        see."""
        if self.chunked:
            return "chunked_attention", "attention_chunk_size"
        return "sliding_attention", "sliding_window"

    def layer_groups(self, config: Any) -> tuple[tuple[str, ...], ...]:
        """The kinds of a model's layers, given transformers' config: for each attention layer those
        before it and its own, for the last one also those behind it. Raises ValueError if none has
        attention."""
        layers: int = config.num_hidden_layers
        if not self.recurrent:
            shared = len(self.borrowed(config))
            kinds = [(kind,) for kind in _sparsities(config)[: layers - shared]]
            return (*kinds[:-1], (*kinds[-1], *["shared"] * shared))
        layer_groups: list[tuple[str, ...]] = []
        waiting: tuple[str, ...] = ()
        for kind in config.layer_types:
            waiting += (kind,)
            if kind not in self.recurrent:
                layer_groups.append(waiting)
                waiting = ()
        if not layer_groups:
            raise ValueError("one of its layers must have attention")
        return (*layer_groups[:-1], layer_groups[-1] + waiting)

    def borrowed(self, config: Any) -> dict[int, int]:
        """For each layer without keys of its own the number of that whose keys it attends to, given
        transformers' config; all such layers are the last."""
        kinds = getattr(config, "layer_types", [])
        own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
        return {
            layer: max(each for each in range(own) if kinds[each] == kinds[layer])
            for layer in range(own, config.num_hidden_layers)
        }

    def attention_layers(self, layer_groups: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
        """The numbers of the attention layers in the model."""
        starts = accumulate(map(len, layer_groups), initial=0)
        pairs = zip(starts, layer_groups, strict=False)
        return tuple(start + self.attention_in(group) for start, group in pairs)

    def attention_in(self, group: tuple[str, ...]) -> int:
        """The place of the attention layer among the kinds of a group."""
        return next(place for place, kind in enumerate(group) if kind not in self.recurrent)


def _sparsities(config: Any) -> list[str]:
    pattern = getattr(config, "activation_sparsity_pattern", None) or [0] * config.num_hidden_layers
    return ["sparse" if share else "attention" for share in pattern]


def _rotates_where_told(config: Any, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])


def _rotates_in_windows(config: Any, layer: int) -> bool:
    """Layers that see everything have no positions where there are others beside them."""
    return config.sliding_window is None or _rotates_in_windows_alone(config, layer)


def _rotates_in_windows_alone(config: Any, layer: int) -> bool:
    sliding: bool = config.layer_types[layer] == "sliding_attention"
    return sliding and config.sliding_window is not None


def _has_no_moe_layers(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types") or config.get("hybrid_override_pattern")
    return not isinstance(kinds, list | str) or not {"moe", "E"} & {*map(str, kinds)}


# transformers' default of what scales the attention, 1, is nobody's.
_MULTIPLIERS = "attention_multiplier embedding_multiplier logits_scaling residual_multiplier"
_DELTA_NETS = (
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
    "linear_num_key_heads linear_num_value_heads"
)

_LATENTS = (
    "kv_lora_rank moe_intermediate_size n_shared_experts q_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim"
)

PLAIN = Architecture()
# Without num_key_value_heads these have as many KV heads as heads; others have those of some
# other model.
AS_MANY_KV_HEADS = Architecture(needs="")

ADMITTED: dict[str, Architecture] = {
    "llama": AS_MANY_KV_HEADS,
    "mistral": PLAIN,
    "qwen2": PLAIN,
    "qwen3": PLAIN,
    "gemma2": PLAIN,
    "gemma3_text": PLAIN,
    "gemma3n_text": Architecture(
        needs=(
            "altup_num_inputs head_dim hidden_size_per_layer_input laurel_rank "
            "num_key_value_heads num_kv_shared_layers sliding_window "
            "vocab_size_per_layer_input"
        ),
        carries=True,
    ),
    "gemma4_text": Architecture(
        needs=(
            "head_dim hidden_size_per_layer_input num_key_value_heads "
            "num_kv_shared_layers sliding_window"
        ),
        experts="num_experts",
        dense=lambda config: not config.get("enable_moe_block"),
        needs_unless=(("global_head_dim", "per_layer_config"),),
        known_as=(("num_experts_per_tok", "top_k_experts"),),
        carries=True,
    ),
    "llama4_text": Architecture(
        needs="attention_chunk_size head_dim intermediate_size_mlp num_key_value_heads",
        rotates=_rotates_where_told,
        experts="num_local_experts",
        neighbors=True,
        angles="complex",
        chunked=True,
    ),
    "phi3": AS_MANY_KV_HEADS,
    "mixtral": Architecture(experts="num_local_experts"),
    "qwen3_moe": Architecture(
        needs="moe_intermediate_size num_key_value_heads", experts="num_experts"
    ),
    "glm4_moe": Architecture(
        needs=(
            "first_k_dense_replace head_dim moe_intermediate_size n_shared_experts "
            "num_key_value_heads"
        ),
        experts="n_routed_experts",
    ),
    "ministral3": Architecture(
        needs="head_dim num_key_value_heads rope_parameters.llama_4_scaling_beta"
    ),
    "deepseek_v3": Architecture(
        needs=f"first_k_dense_replace {_LATENTS}", experts="n_routed_experts", latent=True
    ),
    "deepseek_v2": Architecture(
        needs=f"first_k_dense_replace {_LATENTS}",
        experts="n_routed_experts",
        latent=True,
        neighbors=True,
        angles="complex",
    ),
    "glm4_moe_lite": Architecture(needs=_LATENTS, experts="n_routed_experts", latent=True),
    "gpt_oss": Architecture(
        needs="head_dim num_key_value_heads", experts="num_local_experts", angles="once"
    ),
    "granite": Architecture(needs=_MULTIPLIERS),
    "olmo3": AS_MANY_KV_HEADS,
    "smollm3": Architecture(rotates=_rotates_where_told),
    "exaone4": Architecture(rotates=_rotates_in_windows),
    # Both have a head_dim that is not hidden_size / heads.
    "seed_oss": Architecture(needs="head_dim num_key_value_heads"),
    "hunyuan_v1_dense": Architecture(
        needs="head_dim num_key_value_heads",
        unturnable="this model norms queries and keys after it has rotated them, so that attention "
        "does not depend on distances alone",
    ),
    "cohere2": Architecture(
        needs="logit_scale num_key_value_heads",
        rotates=_rotates_in_windows_alone,
        neighbors=True,
        angles="pairs",
    ),
    "ernie4_5": Architecture(needs="head_dim num_key_value_heads", neighbors=True),
    "glm4": Architecture(needs="head_dim num_key_value_heads", neighbors=True),
    "qwen3_next": Architecture(
        needs=(
            "head_dim moe_intermediate_size num_key_value_heads "
            f"shared_expert_intermediate_size {_DELTA_NETS}"
        ),
        experts="num_experts",
        recurrent=("linear_attention",),
    ),
    "qwen3_5_text": Architecture(
        needs=f"head_dim num_key_value_heads {_DELTA_NETS}",
        recurrent=("linear_attention",),
        mtp="mtp_num_hidden_layers",
    ),
    "qwen3_5_moe_text": Architecture(
        needs=f"head_dim num_key_value_heads shared_expert_intermediate_size {_DELTA_NETS}",
        experts="num_experts",
        recurrent=("linear_attention",),
        width="moe_intermediate_size",
        mtp="mtp_num_hidden_layers",
    ),
    "lfm2": Architecture(
        needs="conv_L_cache num_key_value_heads",
        recurrent=("conv",),
        layout="full_attn_idxs",
        known_as=(("intermediate_size", "block_ff_dim"),),
        attention_norm="operator_norm",
        final_norm="embedding_norm",
    ),
    "nemotron_h": Architecture(
        needs=(
            "conv_kernel head_dim mamba_head_dim mamba_num_heads moe_intermediate_size "
            "moe_shared_expert_intermediate_size n_groups num_key_value_heads "
            "ssm_state_size"
        ),
        experts="n_routed_experts",
        dense=_has_no_moe_layers,
        recurrent=("linear_attention", "mlp", "moe"),
        layout="hybrid_override_pattern",
        known_as=(("layer_types", "layers_block_type"),),
        attention="mixer",
        attention_norm="norm",
        final_norm="norm_f",
        rotates=lambda config, layer: False,
    ),
    "granitemoehybrid": Architecture(
        needs=(
            "mamba_d_conv mamba_d_state mamba_expand mamba_n_groups mamba_n_heads "
            f"num_key_value_heads shared_intermediate_size {_MULTIPLIERS}"
        ),
        experts="num_local_experts",
        dense=lambda config: config.get("num_local_experts") == 0,
        recurrent=("linear_attention",),
        layout="layer_types",
        rotates=lambda config, layer: config.position_embedding_type == "rope",
    ),
}

# Any other is tried, with the check of `engine.selfcheck`.
UNTESTED = Architecture(needs="", unturnable="its architecture was not tested with kvlite")


def architecture(model_type: str) -> Architecture:
    """What is known of an architecture."""
    return ADMITTED.get(model_type, UNTESTED)


def has_experts(model_type: str) -> bool:
    """Whether layers of an architecture, admitted or not, are known to have experts."""
    known = ADMITTED.get(model_type)
    return known is not None and bool(known.experts)


def experts_per_token(config: Any) -> int:
    """The experts of a layer that a token is routed to, given transformers' config; 0 without
    experts."""
    names = "num_experts_per_tok", "top_k_experts"
    return next((count for name in names if (count := getattr(config, name, None))), 0)


# The linear layer that makes keys and values of latents. As it is multiplied into others, it is not
# quantized.
EXPANDS = "kv_b_proj"

# What transformers 4 called kinds of layers.
OLDER_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}

# Architectures whose language model is one part of several: what the part's config may leave out,
# by transformers' documented defaults (Gemma3TextConfig, Mistral3Config).
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "gemma3n": {"model_type": "gemma3n_text"},
    "gemma4": {"model_type": "gemma4_text"},
    "llama4": {"model_type": "llama4_text"},
    "mistral3": {"model_type": "mistral"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
}
# Where a wrapper's checkpoint has the weights of its language model, by the names of transformers 4
# and 5, and what the language model alone calls them.
LANGUAGE_WEIGHTS = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
