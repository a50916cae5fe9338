"""What is particular in the configs of models, by family: what GGUF files store under names of
their own, and what they do not store. Each function gives the keys of a config that are its own.

Source: llama.cpp's converter and its `llama-model.cpp`; published configs for what files do not
store.
"""

from typing import Any

from kvlite.model.gguf.metadata import Metadata
from kvlite.model.gguf.rope import rope_parameters

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
Config = dict[str, Any]
SHARED_WIDTH = "expert_shared_feed_forward_length"


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


def experts(file: Metadata, name: str) -> Config:
    return {
        name: file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
    }


def mistral_rope(file: Metadata, config: Config) -> Config:
    rope = rope_parameters(file, config)
    if config["model_type"] == "mistral":
        return rope
    return {
        "original_max_position_embeddings": config["max_position_embeddings"],
        **rope,
        "llama_4_scaling_beta": float(file.number("attention.temperature_scale")),
    }


def qwen3_moe(file: Metadata, config: Config) -> Config:
    return {
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def gemma2(file: Metadata, config: Config) -> Config:
    is_27b = file.layers == 46
    return {
        "layer_types": [FULL if layer % 2 else SLIDING for layer in range(file.layers)],
        "sliding_window": file.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _per_head(config) if is_27b else config["head_dim"],
        **_softcaps(file),
    }


def _per_head(config: Config) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def _softcaps(file: Metadata) -> Config:
    caps = {
        "attn_logit_softcapping": file.value("attn_logit_softcapping"),
        "final_logit_softcapping": file.value("final_logit_softcapping"),
    }
    return {key: cap or None for key, cap in caps.items()}


def gemma3_rope(file: Metadata, config: Config) -> Config:
    return _rope_by_kind(file, rope_parameters(file, config, theta=1e6), 1e4)


def gemma3(file: Metadata, config: Config) -> Config:
    is_27b = file.layers == 62
    return {
        "layer_types": pattern(file, 6),
        "sliding_window": file.whole("attention.sliding_window"),
        "query_pre_attn_scalar": _per_head(config) if is_27b else config["head_dim"],
        **_softcaps(file),
    }


def gemma3n(file: Metadata, config: Config) -> Config:
    from statistics import NormalDist

    scales = file.by_layer("activation_sparsity_scale", 0.0)
    rank = file.rows("blk.0.laurel_l.weight")
    if not 0 <= file.whole("altup.active_idx") < file.whole("altup.num_inputs"):
        raise file.wrong("altup.active_idx", "it must be one of the inputs")
    share = NormalDist()
    widths = file.by_layer("feed_forward_length")
    return {
        "intermediate_size": widths,
        "layer_types": pattern(file, 5),
        "sliding_window": file.whole("attention.sliding_window"),
        "altup_num_inputs": file.whole("altup.num_inputs"),
        "altup_active_idx": file.whole("altup.active_idx"),
        "altup_coef_clip": 120.0,
        "laurel_rank": rank,
        "hidden_size_per_layer_input": file.whole("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.rows("per_layer_token_embd.weight"),
        "num_kv_shared_layers": file.whole("attention.shared_kv_layers"),
        # Stored is where the normal distribution has the share, which is -inf for 0.
        "activation_sparsity_pattern": [
            round(share.cdf(scale), 6) if scale > -1e9 and scale else 0.0 for scale in scales
        ],
        "final_logit_softcapping": float(file.number("final_logit_softcapping", 30.0)),
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
    shared = file.whole("attention.shared_kv_layers", 0)
    full = kinds.index(FULL)
    sliding = kinds.index(SLIDING)
    made: Config = {
        "layer_types": kinds,
        "head_dim": file.whole("attention.key_length_swa", config["head_dim"]),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": heads[sliding],
        "num_global_key_value_heads": heads[full],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": file.whole("embedding_length_per_layer_input", 0),
        "sliding_window": file.whole("attention.sliding_window"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "final_logit_softcapping": float(file.number("final_logit_softcapping", 30.0)),
        "enable_moe_block": False,
    }
    if "per_layer_token_embd.weight" in file.tensors:
        made["vocab_size_per_layer_input"] = file.rows("per_layer_token_embd.weight")
    if file.has("expert_count"):
        made |= {
            "enable_moe_block": True,
            "top_k_experts": file.whole("expert_used_count"),
            "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        }
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


def gpt_oss(file: Metadata, config: Config) -> Config:
    return {
        "intermediate_size": file.whole("expert_feed_forward_length"),
        "sliding_window": file.whole("attention.sliding_window"),
        "layer_types": [FULL if layer % 2 else SLIDING for layer in range(file.layers)],
        "attention_bias": True,
    }


def glm4_moe(file: Metadata, config: Config) -> Config:
    return {
        **routed_experts(file, gating=2),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "num_nextn_predict_layers": 0,
    }


def routed_experts(file: Metadata, *, gating: int, groups: tuple[int, int] = (1, 1)) -> Config:
    """Experts of DeepSeek's kind; `gating` is llama.cpp's number of what makes scores, where the
    file does not say it."""
    found = file.whole("expert_gating_func", 0) or gating
    if found not in (1, 2):
        raise file.wrong("expert_gating_func", "kvlite knows 1 and 2 here")
    made = {
        "n_shared_experts": file.whole("expert_shared_count", 0),
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "first_k_dense_replace": file.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": float(file.number("expert_weights_scale", 1.0)) or 1.0,
        "norm_topk_prob": bool(file.number("expert_weights_norm", False)),
        "n_group": file.whole("expert_group_count", groups[0]),
        "topk_group": file.whole("expert_group_used_count", groups[1]),
    }
    return made | {"scoring_func": "sigmoid" if found == 2 else "softmax"}


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
        "kv_lora_rank": file.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys - turned,
        "v_head_dim": values,
        "head_dim": turned,
        "rope_interleave": True,
        **routed,
    }
    if kind == "deepseek_v2":
        made["topk_method"] = "group_limited_greedy" if routed["n_group"] > 1 else "greedy"
    if kind == "glm4_moe_lite":
        dense = made.pop("first_k_dense_replace")
        layers = config["num_hidden_layers"]
        made["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    return made


def granite(file: Metadata, config: Config) -> Config:
    """Multipliers of 1 are not stored."""
    return {
        "attention_multiplier": float(file.number("attention.scale", 1.0)),
        "embedding_multiplier": float(file.number("embedding_scale", 1.0)),
        "residual_multiplier": float(file.number("residual_scale", 1.0)),
        "logits_scaling": float(file.number("logit_scale", 1.0)),
    }


def granite_moe(file: Metadata, config: Config) -> Config:
    if file.has(SHARED_WIDTH):
        raise file.wrong(SHARED_WIDTH, "kvlite does not run Granite's experts beside a shared MLP")
    return {**granite(file, config), **experts(file, "num_local_experts")}


def olmo_rope(file: Metadata, config: Config) -> Config:
    full = rope_parameters(file, config)
    is_plain = config["model_type"] == "olmo2"
    return full if is_plain else _rope_by_kind(file, full, full["rope_theta"])


def olmo(file: Metadata, config: Config) -> Config:
    if config["model_type"] == "olmo2":
        return {}
    return {
        "sliding_window": file.whole("attention.sliding_window"),
        "layer_types": pattern(file, 4),
    }


def smollm3(file: Metadata, config: Config) -> Config:
    turns = [int((layer + 1) % 4 > 0) for layer in range(file.layers)]
    return {"no_rope_layers": turns, "no_rope_layer_interval": 4, "use_sliding_window": False}


def exaone4(file: Metadata, config: Config) -> Config:
    is_32b = file.layers == 64
    window = file.whole("attention.sliding_window", 4096 if is_32b else 0)
    kinds = pattern(file, 4) if window else [FULL] * file.layers
    return {"sliding_window": window or None, "layer_types": kinds, "sliding_window_pattern": 4}


def cohere2(file: Metadata, config: Config) -> Config:
    return {
        "logit_scale": file.number("logit_scale"),
        "sliding_window": file.whole("attention.sliding_window"),
        "layer_types": pattern(file, 4),
    }


def llama4(file: Metadata, config: Config) -> Config:
    count = file.whole("expert_count")
    interval = file.whole("interleave_moe_layer_step", 1)
    return {
        "intermediate_size_mlp": file.whole("feed_forward_length"),
        "intermediate_size": file.whole("expert_feed_forward_length"),
        "interleave_moe_layer_step": interval,
        "attention_chunk_size": 8192,
        "no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(file.layers)],
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": count != 128,
    }
