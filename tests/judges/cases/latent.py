"""Cases of DeepSeek and GLM."""

from tests.judges.case import DEEP, REMOVED, ROUTED, Case, Config, rope, yarn

LATENT: Config = {
    "head_dim": REMOVED,
    # That of compressed vectors' norms, in transformers; llama.cpp takes the file's.
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 80,
    "q_lora_rank": 112,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
    **ROUTED,
}
_SIGMOID = {"scoring_func": "sigmoid"}
_GLM_MOE: Config = {
    **ROUTED,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "attention_bias": True,
    "rope_parameters": rope(partial_rotary_factor=0.5),
}

CASES: list[Case] = [
    Case(
        "glm4",
        "glm4",
        "half rotated",
        {"rope_parameters": rope(partial_rotary_factor=0.5), "attention_bias": True},
        pre="glm4",
        seed=3,
    ),
    Case("glm4_moe", "glm4_moe", "experts, half rotated", {**_GLM_MOE, "use_qk_norm": True}),
    Case(
        "glm4_moe-mtp",
        "glm4_moe",
        "without q/k norms, with a layer for multi-token prediction",
        {**_GLM_MOE, "use_qk_norm": False},
        {"num_nextn_predict_layers": 1},
        extra_layers=1,
    ),
    Case(
        "glm4_moe_lite-mtp",
        "glm4_moe_lite",
        "with a layer for multi-token prediction",
        {**LATENT, "routed_scaling_factor": 1.7, "rope_parameters": rope()},
        {**_SIGMOID, "num_nextn_predict_layers": 1},
        extra_layers=1,
        pre="glm4",
        seed=1,
    ),
    Case(
        "glm4_moe_lite",
        "glm4_moe_lite",
        "47 layers: sigmoid gates",
        {
            **DEEP,
            **LATENT,
            "routed_scaling_factor": 1.7,
            "num_hidden_layers": 47,
            "rope_parameters": rope(),
        },
        pre="glm4",
        llama_cpp="differs",
        reason="llama.cpp knows GLM-4.7-Flash by its vocabulary, too, or takes softmax",
        # In so many layers, roundings do choose other experts.
        rounding=0.1,
        seed=1,
    ),
    Case(
        "deepseek_v2",
        "deepseek_v2",
        "yarn",
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "topk_method": "greedy",
            "rope_parameters": yarn(
                40.0, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707
            ),
        },
        pre="deepseek-llm",
    ),
    Case(
        "deepseek_v2-lite",
        "deepseek_v2",
        "27 layers: queries are not compressed",
        {
            **DEEP,
            **LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 27,
            "routed_scaling_factor": 1.0,
            "rope_parameters": rope(),
        },
        pre="deepseek-llm",
        seed=1,
    ),
    Case(
        "deepseek_v2-groups",
        "deepseek_v2",
        "experts by groups",
        {
            **LATENT,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "rope_parameters": rope(),
        },
        pre="deepseek-llm",
        llama_cpp="differs",
        reason="llama.cpp ranks groups as DeepSeek-V3 does, by their best two experts",
        seed=1,
    ),
    Case(
        "deepseek_v3",
        "deepseek_v3",
        "yarn, experts by groups",
        {
            **LATENT,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": yarn(
                40.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
            ),
        },
        _SIGMOID,
        pre="deepseek-v3",
    ),
]
