"""What is particular in the configs of models, by family: what GGUF files store under names of
their own, and what they do not store. Each function gives the keys of a config that are its own.

Source: llama.cpp's converter and its `llama-model.cpp`; published configs for what files do not
store.
"""

from typing import Any

from kvlite.model.gguf.index import Order
from kvlite.model.gguf.metadata import Metadata
from kvlite.model.gguf.rope import rope_parameters

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
Config = dict[str, Any]
SHARED_WIDTH = "expert_shared_feed_forward_length"
# Keys that several have, as of `Metadata.read`.
WINDOW = "sliding_window=attention.sliding_window"
EXPERT_WIDTH = "moe_intermediate_size=expert_feed_forward_length"


def pattern(file: Metadata, default: int) -> list[str]:
    """The kinds of layers: each so many-th sees everything, others slide."""
    found = file.value("attention.sliding_window_pattern")
    if isinstance(found, tuple):
        slides = file.by_layer("attention.sliding_window_pattern")
        return [SLIDING if each else FULL for each in slides]
    each = found if type(found) is int and found > 0 else default
    return [FULL if (layer + 1) % each == 0 else SLIDING for layer in range(file.layers)]


def _rope_by_kind(file: Metadata, full: Config, sliding_theta: float) -> Config:
    """Scaling is for layers that see everything."""
    own = float(file.number("rope.freq_base_swa", sliding_theta))
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": own}}


def mistral_rope(file: Metadata, config: Config) -> Config:
    rope = rope_parameters(file, config)
    if config["model_type"] == "mistral":
        return rope
    return {
        "original_max_position_embeddings": config["max_position_embeddings"],
        **rope,
        "llama_4_scaling_beta": float(file.number("attention.temperature_scale")),
    }


def sliding(file: Metadata, config: Config, *, each: int) -> Config:
    return {"layer_types": pattern(file, each)}


def gemma(file: Metadata, config: Config, *, each: int, largest: int) -> Config:
    """Gemma 2 and 3; that with the `largest` number of layers scales queries by its own size."""
    size = config["head_dim"]
    if file.layers == largest:
        size = config["hidden_size"] // config["num_attention_heads"]
    caps = "attn_logit_softcapping", "final_logit_softcapping"
    return {
        "layer_types": pattern(file, each),
        "query_pre_attn_scalar": size,
        **{key: file.value(key) or None for key in caps},
    }


def gemma3_rope(file: Metadata, config: Config) -> Config:
    return _rope_by_kind(file, rope_parameters(file, config, theta=1e6), 1e4)


def gemma3n(file: Metadata, config: Config) -> Config:
    from statistics import NormalDist

    scales, share = file.by_layer("activation_sparsity_scale", 0.0), NormalDist()
    if not 0 <= config["altup_active_idx"] < config["altup_num_inputs"]:
        raise file.wrong("altup.active_idx", "it must be one of the inputs")
    return {
        "intermediate_size": file.by_layer("feed_forward_length"),
        "layer_types": pattern(file, 5),
        "laurel_rank": file.rows("blk.0.laurel_l.weight"),
        "vocab_size_per_layer_input": file.rows("per_layer_token_embd.weight"),
        # Stored is where the normal distribution has the share, which is -inf for 0.
        "activation_sparsity_pattern": [
            round(share.cdf(scale), 6) if scale > -1e9 and scale else 0.0 for scale in scales
        ],
    }


def gemma4_rope(file: Metadata, config: Config) -> Config:
    full = rope_parameters(file, config, theta=1e6)
    if full["rope_type"] == "default":
        full = {**full, "rope_type": "proportional", "partial_rotary_factor": 1.0}
    made = _rope_by_kind(file, full, 1e4)
    head_dim = file.whole("attention.key_length_swa", config["head_dim"])
    turned = file.whole("rope.dimension_count_swa", head_dim)
    if turned != head_dim:
        made[SLIDING]["partial_rotary_factor"] = turned / head_dim
    return made


def gemma4(file: Metadata, config: Config) -> Config:
    kinds = pattern(file, 6)
    heads = file.by_layer("attention.head_count_kv")
    widths = file.by_layer("feed_forward_length")
    full = kinds.index(FULL)
    made: Config = {
        "layer_types": kinds,
        "head_dim": file.whole("attention.key_length_swa", config["head_dim"]),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": heads[kinds.index(SLIDING)],
        "num_global_key_value_heads": heads[full],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "enable_moe_block": file.has("expert_count"),
    }
    if "per_layer_token_embd.weight" in file.tensors:
        made["vocab_size_per_layer_input"] = file.rows("per_layer_token_embd.weight")
    if file.has("expert_count"):
        made |= file.read(f"top_k_experts=expert_used_count {EXPERT_WIDTH}")
    return made


def phi3(file: Metadata, config: Config) -> Config:
    window = file.value("attention.sliding_window")
    if window is None:  # the first files do not say it
        old = config["max_position_embeddings"] == 4096 and file.layers in (32, 40)
        window = 2047 if old else 0
    original = file.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def gpt_oss_rope(file: Metadata, config: Config) -> Config:
    return {**rope_parameters(file, config), "truncate": False}


def routed_experts(file: Metadata, *, gating: int, groups: tuple[int, int] = (1, 1)) -> Config:
    """Experts of DeepSeek's kind; `gating` is llama.cpp's number of what makes scores, where the
    file does not say it."""
    found = file.whole("expert_gating_func", 0) or gating
    if found not in (1, 2):
        raise file.wrong("expert_gating_func", "kvlite knows 1 and 2 here")
    return {
        **file.read(
            f"{EXPERT_WIDTH} n_shared_experts=expert_shared_count:0 "
            f"first_k_dense_replace=leading_dense_block_count:0 "
            f"n_group=expert_group_count:{groups[0]} topk_group=expert_group_used_count:{groups[1]}"
        ),
        "routed_scaling_factor": float(file.number("expert_weights_scale", 1.0)) or 1.0,
        "norm_topk_prob": bool(file.number("expert_weights_norm", False)),
        "scoring_func": "sigmoid" if found == 2 else "softmax",
    }


def deepseek_type(file: Metadata) -> str:
    if file.header.fields.get("tokenizer.ggml.pre") == "glm4":
        return "glm4_moe_lite"
    has_bias = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    return "deepseek_v3" if has_bias else "deepseek_v2"


def deepseek_rope(file: Metadata, config: Config) -> Config:
    turned = file.whole("rope.dimension_count")
    return rope_parameters(file, {**config, "head_dim": turned}, log_multiplier=0.1)


def deepseek(file: Metadata, config: Config) -> Config:
    kind, heads = config["model_type"], config["num_attention_heads"]
    turned = file.whole("rope.dimension_count")
    # The first files have the lengths of unfolded heads under the plain names.
    keys = file.whole("attention.key_length_mla", file.whole("attention.key_length"))
    values = file.whole("attention.value_length_mla", file.whole("attention.value_length"))
    # Neither is stored by the first files, and DeepSeek-V3 and V2 differ.
    groups = {"deepseek_v3": (8, 4), "deepseek_v2": (1, 1), "glm4_moe_lite": (1, 1)}[kind]
    if kind == "deepseek_v2" and config["hidden_size"] == 5120:
        groups = (8, 3)
    if kind == "deepseek_v3" and config["hidden_size"] != 7168:
        groups = (1, 1)
    routed = routed_experts(file, gating=1 if kind == "deepseek_v2" else 2, groups=groups)
    made = {
        "num_key_value_heads": heads,
        "q_lora_rank": file.whole("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys - turned,
        "v_head_dim": values,
        "head_dim": turned,
        **routed,
    }
    if kind == "deepseek_v2":
        made["topk_method"] = "group_limited_greedy" if routed["n_group"] > 1 else "greedy"
    if kind == "glm4_moe_lite":
        dense = made.pop("first_k_dense_replace")
        layers = config["num_hidden_layers"]
        made["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    return made


def granite_moe(file: Metadata, config: Config) -> Config:
    if file.has(SHARED_WIDTH):
        raise file.wrong(SHARED_WIDTH, "kvlite does not run Granite's experts beside a shared MLP")
    return {}


def olmo_rope(file: Metadata, config: Config) -> Config:
    full = rope_parameters(file, config)
    is_plain = config["model_type"] == "olmo2"
    return full if is_plain else _rope_by_kind(file, full, full["rope_theta"])


def olmo(file: Metadata, config: Config) -> Config:
    if config["model_type"] == "olmo2":
        return {}
    return {**file.read(WINDOW), "layer_types": pattern(file, 4)}


def fourth_still(file: Metadata, config: Config) -> Config:
    """Each fourth layer does not rotate."""
    return {
        "no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(file.layers)],
        "no_rope_layer_interval": 4,
    }


def exaone4(file: Metadata, config: Config) -> Config:
    is_32b = file.layers == 64
    window = file.whole("attention.sliding_window", 4096 if is_32b else 0)
    kinds = pattern(file, 4) if window else [FULL] * file.layers
    return {"sliding_window": window or None, "layer_types": kinds, "sliding_window_pattern": 4}


def llama4(file: Metadata, config: Config) -> Config:
    return {**fourth_still(file, config), "use_qk_norm": file.whole("expert_count") != 128}


def state_heads(file: Metadata) -> int:
    """The size of a head of states."""
    return file.whole("ssm.inner_size") // file.size("ssm.time_step_rank")


def delta_net(file: Metadata, config: Config) -> Config:
    """Qwen's hybrids: each fourth layer has attention."""
    interval = file.size("full_attention_interval", 4)
    kinds = (
        FULL if (layer + 1) % interval == 0 else RECURRENT
        for layer in range(config["num_hidden_layers"])
    )
    made = {"layer_types": [*kinds], "linear_value_head_dim": state_heads(file)}
    if file.predicted:
        made["mtp_num_hidden_layers"] = file.predicted
    return made


def grouped(config: Config, *, first: int = 0, dim: int | None = None) -> Order | None:
    """The order of value heads, from row `first` on. Those that are as many as key heads are where
    they belong."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys == values:
        return None
    return "grouped", (first, keys, values // keys, dim or config["linear_value_head_dim"])


def grouped_values(config: Config) -> Order | None:
    """The order of value heads behind queries and keys."""
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return grouped(config, first=first)


def by_key_head(config: Config) -> Order:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    own = values // keys * config["linear_value_head_dim"]
    return "by_key_head", (keys, config["linear_key_head_dim"], own)


def granite_alone(file: Metadata, config: Config) -> Config:
    """The MLP of a hybrid all of whose layers have attention is what others share."""
    return {"intermediate_size": file.whole(SHARED_WIDTH, config["intermediate_size"])}


def granite_hybrid(file: Metadata, config: Config) -> Config:
    heads = file.by_layer("attention.head_count_kv")
    made = {
        "layer_types": [FULL if each else RECURRENT for each in heads],
        "position_embedding_type": "rope" if file.value("rope.scaling.finetuned") else "nope",
        "shared_intermediate_size": file.whole(SHARED_WIDTH, config["intermediate_size"]),
        "mamba_d_head": state_heads(file),
        "mamba_expand": file.whole("ssm.inner_size") // config["hidden_size"],
    }
    if not file.whole("expert_count", 0):
        made |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    return made


def lfm2(file: Metadata, config: Config) -> Config:
    heads = file.by_layer("attention.head_count_kv")
    return {"layer_types": [FULL if each else "conv" for each in heads]}


def nemotron(file: Metadata, config: Config) -> Config:
    heads = file.by_layer("attention.head_count_kv")
    widths = file.by_layer("feed_forward_length")
    has_experts = bool(file.whole("expert_count", 0))
    mlp = "moe" if has_experts else "mlp"
    kinds = [
        "attention" if own else mlp if width else "mamba"
        for own, width in zip(heads, widths, strict=True)
    ]
    made = {
        "layers_block_type": kinds,
        "layer_norm_epsilon": config.get("rms_norm_eps", config.get("layer_norm_eps")),
        "mamba_head_dim": state_heads(file),
    }
    if has_experts:
        shared = file.whole(SHARED_WIDTH)
        routed = routed_experts(file, gating=2)
        for unknown in ("first_k_dense_replace", "scoring_func"):
            routed.pop(unknown)
        made |= routed | {"moe_shared_expert_intermediate_size": shared}
        made["moe_latent_size"] = file.whole("moe_latent_size", 0) or None
    return made
