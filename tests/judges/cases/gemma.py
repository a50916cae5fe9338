"""Cases of Gemma. llama.cpp takes GELU from a table of 16-bit numbers."""

from tests.judges.case import DEEP, WINDOW, Case, Config, rope

GEMMA3: Config = {**WINDOW, "query_pre_attn_scalar": 48, "num_hidden_layers": 7}
GEMMA4: Config = {
    "rms_norm_eps": 3e-4,
    "num_hidden_layers": 6,
    "sliding_window": 56,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 704,
    "head_dim": 48,
    "global_head_dim": 80,
    "final_logit_softcapping": 17.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 60_000.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": rope(theta=13_000.0),
    },
}
GEMMA3N: Config = {
    **WINDOW,
    "vocab_size_per_layer_input": 704,
    "rope_parameters": {
        "full_attention": rope(theta=60_000.0),
        "sliding_attention": rope(theta=13_000.0),
    },
}
_BY_KIND = {
    "full_attention": rope("linear", 60_000.0, factor=8.0),
    "sliding_attention": rope(theta=13_000.0),
}
# llama.cpp takes GELU from a table of 16-bit numbers.
GELU = 2e-2

CASES: list[Case] = [
    Case(
        "gemma2",
        "gemma2",
        "windows, soft caps",
        {
            **WINDOW,
            "query_pre_attn_scalar": 48,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 7.0,
        },
        tolerance=GELU,
        sharper=0.3,
        seed=1,
    ),
    Case(
        "gemma2-27b",
        "gemma2",
        "46 layers: scaled by hidden size / heads",
        {**DEEP, **WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 46},
        tolerance=GELU,
    ),
    Case(
        "gemma3",
        "gemma3_text",
        "windows",
        {
            **GEMMA3,
            "rope_parameters": {**_BY_KIND, "full_attention": rope(theta=60_000.0)},
        },
        tolerance=GELU,
        seed=1,
    ),
    Case(
        "gemma3-linear",
        "gemma3_text",
        "linear in full layers",
        {**GEMMA3, "rope_parameters": _BY_KIND},
        tolerance=GELU,
    ),
    Case(
        "gemma3-27b",
        "gemma3_text",
        "62 layers: scaled by hidden size / heads",
        {**GEMMA3, **DEEP, "query_pre_attn_scalar": 16, "num_hidden_layers": 62},
        tolerance=GELU,
        seed=4,
    ),
    Case(
        "gemma3n",
        "gemma3n_text",
        "AltUp, LAuReL, shared K/V, sparse activations",
        # llama.cpp knows these by heart, and laurel_rank and inputs by layer.
        {
            **DEEP,
            **GEMMA3N,
            "num_hidden_layers": 30,
            "num_kv_shared_layers": 10,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
            "laurel_rank": 64,
            "hidden_size_per_layer_input": 256,
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
            "final_logit_softcapping": 30.0,
        },
        tolerance=0.5,
        reason="llama.cpp divides by n - 1 in deviations, which tells in small layers",
        sharper=-1.0,
    ),
    Case(
        "gemma3n-small",
        "gemma3n_text",
        "other sizes",
        {
            **GEMMA3N,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "laurel_rank": 40,
            "hidden_size_per_layer_input": 56,
            "activation_sparsity_pattern": [0.9] * 2 + [0.0] * 4,
            "final_logit_softcapping": 7.0,
        },
        llama_cpp="refuses",
        reason="llama.cpp knows the published sizes alone",
        sharper=-0.8,
        seed=5,
    ),
    Case(
        "gemma4",
        "gemma4_text",
        "proportional rotation, inputs by layer",
        {**GEMMA4, "hidden_size_per_layer_input": 40},
        {"global_head_dim": 80},
        tolerance=GELU,
        sharper=-0.8,
        seed=3,
    ),
    Case(
        "gemma4-shared",
        "gemma4_text",
        "shared K/V, twice as wide MLPs",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 40,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        {"global_head_dim": 80},
        tolerance=GELU,
        sharper=-0.8,
        seed=2,
    ),
    Case(
        "gemma4-moe",
        "gemma4_text",
        "experts, keys as values in full layers",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 96,
        },
        {"global_head_dim": 80, "num_global_key_value_heads": 1},
        tolerance=0.5,
        reason="llama.cpp's GELU decides between experts that are nearly equal",
        sharper=-0.8,
    ),
]
