"""Cases of Qwen."""

from tests.judges.case import REMOVED, WINDOW, WINDOW_LOST, Case, Config, rope, yarn

EXPERTS: Config = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
DELTA: Config = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "head_dim": 64,
    "num_hidden_layers": 5,
}

CASES: list[Case] = [
    Case("qwen2", "qwen2", "biases", {"head_dim": REMOVED, "rope_parameters": rope()}),
    Case("qwen2-yarn", "qwen2", "yarn", {"head_dim": REMOVED, "rope_parameters": yarn()}),
    Case(
        "qwen2-window",
        "qwen2",
        "window",
        {"head_dim": REMOVED, **WINDOW, "use_sliding_window": True, "max_window_layers": 2},
        lost={"use_sliding_window": False, "sliding_window": None, "layer_types": None},
        reason=WINDOW_LOST,
    ),
    Case("qwen3", "qwen3", "plain", {"rope_parameters": rope(theta=5e6)}),
    Case("qwen3-yarn", "qwen3", "yarn", {"rope_parameters": yarn()}),
    Case(
        "qwen3_moe",
        "qwen3_moe",
        "experts",
        {**EXPERTS, "norm_topk_prob": True, "rope_parameters": rope()},
    ),
    Case(
        "qwen3_moe-yarn",
        "qwen3_moe",
        "yarn",
        {**EXPERTS, "norm_topk_prob": True, "rope_parameters": yarn()},
    ),
    Case(
        "qwen3_next",
        "qwen3_next",
        "experts, a quarter rotated",
        {
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 160,
            "norm_topk_prob": True,
            "rope_parameters": rope(partial_rotary_factor=0.25),
        },
        options=("--no-mtp",),
    ),
    Case(
        "qwen3_next-mtp",
        "qwen3_next",
        "with a layer for multi-token prediction",
        {
            **DELTA,
            **EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 160,
            "norm_topk_prob": True,
            "rope_parameters": rope(partial_rotary_factor=0.25),
        },
        extra_layers=1,
    ),
    Case(
        "qwen3_next-yarn",
        "qwen3_next",
        "yarn",
        {
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 160,
            "norm_topk_prob": True,
            "rope_parameters": yarn(partial_rotary_factor=0.25),
        },
        options=("--no-mtp",),
    ),
    Case(
        "qwen3_5",
        "qwen3_5_text",
        "a quarter rotated",
        {**DELTA, "rope_parameters": rope(partial_rotary_factor=0.25)},
        options=("--no-mtp",),
        pre="qwen35",
    ),
    Case(
        "qwen3_5-mtp",
        "qwen3_5_text",
        "with a layer for multi-token prediction",
        {**DELTA, "num_hidden_layers": 4, "rope_parameters": rope(partial_rotary_factor=0.25)},
        {"mtp_num_hidden_layers": 1},
        extra_layers=1,
        pre="qwen35",
    ),
    Case(
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "experts",
        {
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 160,
            "rope_parameters": rope(partial_rotary_factor=0.25),
        },
        options=("--no-mtp",),
        pre="qwen35",
    ),
    Case(
        "qwen3_5_moe-fused",
        "qwen3_5_moe_text",
        "gate and up in one tensor, with a layer for multi-token prediction",
        {
            **DELTA,
            **EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 160,
            "rope_parameters": rope(partial_rotary_factor=0.25),
        },
        {"mtp_num_hidden_layers": 1},
        extra_layers=1,
        options=("--fuse-gate-up-exps",),
        pre="qwen35",
    ),
]
