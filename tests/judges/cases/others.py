"""Cases of Phi, GPT-OSS, OLMo, SmolLM, Seed-OSS, EXAONE, Hunyuan, ERNIE, Command R and Llama 4."""

from tests.judges.case import DEEP, REMOVED, WINDOW, Case, Config, llama3, rope, yarn

COHERE: Config = {
    "head_dim": REMOVED,
    "rms_norm_eps": REMOVED,
    "layer_norm_eps": 3e-4,
    "logit_scale": 1.3,
    "rope_parameters": rope(),
}
PHI3: Config = {
    "head_dim": REMOVED,
    "sliding_window": None,
    "original_max_position_embeddings": 3072,
}
_FACTORS: Config = {
    "short_factor": [1.0 + 0.05 * number for number in range(16)],
    "long_factor": [1.5 + 0.3 * number for number in range(16)],
}

CASES: list[Case] = [
    Case("phi3", "phi3", "plain", {**PHI3, "rope_parameters": rope()}),
    Case(
        "phi3-window",
        "phi3",
        "window",
        {**PHI3, **WINDOW, "rope_parameters": rope()},
        llama_cpp="differs",
        reason="llama.cpp ignores the window",
    ),
    Case(
        "phi3-longrope",
        "phi3",
        "longrope, longer than the original context",
        {
            **PHI3,
            "original_max_position_embeddings": 192,
            "rope_parameters": rope("longrope", **_FACTORS, original_max_position_embeddings=192),
        },
    ),
    Case(
        "phi3-longrope-short",
        "phi3",
        "longrope, within the original context",
        {
            **PHI3,
            "original_max_position_embeddings": 1024,
            "rope_parameters": rope("longrope", **_FACTORS, original_max_position_embeddings=1024),
        },
    ),
    Case(
        "phi4-mini",
        "phi3",
        "three quarters rotated, tied",
        {
            **PHI3,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "rope_parameters": rope(partial_rotary_factor=0.75),
        },
    ),
    Case(
        "gpt_oss",
        "gpt_oss",
        "experts, sinks, windows, yarn",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            **WINDOW,
            "rope_parameters": yarn(32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
        },
        llama_cpp="differs",
        reason="llama.cpp rounds the ends of the ramp (truncate), GPT-OSS does not",
    ),
    Case("olmo2", "olmo2", "norms behind", {"head_dim": REMOVED, "rope_parameters": rope()}),
    Case("olmo3", "olmo3", "windows", {"head_dim": REMOVED, **WINDOW, "rope_parameters": rope()}),
    Case(
        "olmo3-yarn",
        "olmo3",
        "yarn in full layers",
        {
            "head_dim": REMOVED,
            **WINDOW,
            "rope_parameters": {
                "full_attention": yarn(attention_factor=1.1609437912434102),
                "sliding_attention": rope(),
            },
        },
    ),
    Case(
        "smollm3",
        "smollm3",
        "each fourth layer is not rotated",
        {"head_dim": REMOVED, "num_hidden_layers": 5, "rope_parameters": rope()},
    ),
    Case(
        "smollm3-yarn",
        "smollm3",
        "yarn",
        {"head_dim": REMOVED, "num_hidden_layers": 5, "rope_parameters": yarn()},
    ),
    Case("seed_oss", "seed_oss", "biases", {"rope_parameters": rope()}),
    Case(
        "exaone4",
        "exaone4",
        "llama3, no windows",
        {
            "head_dim": REMOVED,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": llama3(),
        },
        pre="exaone4",
    ),
    Case(
        "exaone4-window",
        "exaone4",
        "64 layers with windows",
        {
            **DEEP,
            "head_dim": REMOVED,
            **WINDOW,
            "num_hidden_layers": 64,
            "sliding_window_pattern": 4,
            "rope_parameters": llama3(),
        },
        pre="exaone4",
    ),
    Case(
        "hunyuan",
        "hunyuan_v1_dense",
        "plain",
        {"rope_parameters": rope()},
        pre="hunyuan-dense",
    ),
    Case(
        "hunyuan-alpha",
        "hunyuan_v1_dense",
        "NTK by alpha",
        {
            "hidden_size": 512,
            "num_attention_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": rope("dynamic", 10_000.0, alpha=1000.0, factor=1.0),
        },
        pre="hunyuan-dense",
    ),
    Case("ernie4_5", "ernie4_5", "tied", {"rope_parameters": rope(), "use_bias": False}),
    Case("cohere", "cohere", "Command R", COHERE, pre="command-r"),
    Case(
        "cohere-norms",
        "cohere",
        "Command R+: 64 layers with q/k norms",
        {**DEEP, **COHERE, "use_qk_norm": True, "num_hidden_layers": 64},
        pre="command-r",
    ),
    Case(
        "cohere2",
        "cohere2",
        "windows; full layers are not rotated",
        {**COHERE, **WINDOW, "num_hidden_layers": 5},
        {"rotary_pct": 1.0},
        pre="command-r",
    ),
    Case(
        "llama4",
        "llama4_text",
        "16 experts, q/k norms, chunks of 8192",
        {
            "intermediate_size": 96,
            "intermediate_size_mlp": 320,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "interleave_moe_layer_step": 1,
            "num_hidden_layers": 5,
            "use_qk_norm": True,
            "rope_parameters": llama3(16.0),
        },
        pre="llama4",
    ),
    Case(
        "llama4-128",
        "llama4_text",
        "128 experts in each second layer, no q/k norms",
        {
            "intermediate_size": 32,
            "intermediate_size_mlp": 320,
            "num_local_experts": 128,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 5,
            "use_qk_norm": False,
            "rope_parameters": rope(),
        },
        pre="llama4",
    ),
]
