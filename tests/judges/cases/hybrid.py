"""Cases of Granite, LFM 2 and Nemotron-H, most with recurrent layers."""

from tests.judges.case import REMOVED, ROUTED, Case, Config, rope

GRANITE: Config = {
    "head_dim": REMOVED,
    "embedding_multiplier": 3.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
    "attention_multiplier": 0.11,
    "rope_parameters": rope(),
}
MAMBA: Config = {
    "mamba_n_heads": 12,
    "mamba_d_head": 32,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    # llama.cpp wants 2.
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "shared_intermediate_size": 160,
    "num_hidden_layers": 5,
    "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
}
NEMOTRON: Config = {
    "num_hidden_layers": REMOVED,
    "rms_norm_eps": REMOVED,
    "layer_norm_epsilon": 3e-4,
    "mamba_num_heads": 12,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 24,
    "conv_kernel": 3,
    "chunk_size": 64,
}
NEMOTRON_EXPERTS: Config = {
    **NEMOTRON,
    "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"],
    **ROUTED,
    "moe_shared_expert_intermediate_size": 160,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
}
_HYBRID = {"layer_types": ["mamba", "attention", "mamba", "mamba", "attention"]}

CASES: list[Case] = [
    Case("granite", "granite", "multipliers", GRANITE),
    Case(
        "granitemoe",
        "granitemoe",
        "experts",
        {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 96},
    ),
    Case(
        "granitemoeshared",
        "granitemoeshared",
        "experts and a shared one",
        {
            **GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 96,
            "shared_intermediate_size": 160,
        },
    ),
    Case(
        "granitehybrid",
        "granitemoehybrid",
        "Mamba 2 and experts",
        {
            **GRANITE,
            **MAMBA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 96,
            "position_embedding_type": "nope",
        },
        _HYBRID,
    ),
    Case(
        "granitehybrid-dense",
        "granitemoehybrid",
        "Mamba 2, dense, rotated",
        {
            **GRANITE,
            **MAMBA,
            "intermediate_size": 160,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
        },
        _HYBRID,
        lost={"position_embedding_type": "nope"},
        reason="the converter says that hybrids are not rotated",
    ),
    Case(
        "granitehybrid-attention",
        "granitemoehybrid",
        "attention in all layers, rotated",
        {
            **GRANITE,
            **MAMBA,
            "layer_types": ["attention"] * 5,
            "intermediate_size": 160,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
        },
        {"layer_types": ["attention"] * 5},
    ),
    Case(
        "lfm2",
        "lfm2",
        "short convolutions",
        {
            "head_dim": REMOVED,
            "rms_norm_eps": REMOVED,
            "norm_eps": 3e-4,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.1,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "rope_parameters": rope(),
        },
        pre="lfm2",
    ),
    Case(
        "nemotron_h",
        "nemotron_h",
        "Mamba 2, attention, MLPs",
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]},
        {
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "M-M*-",
            "num_experts_per_tok": REMOVED,
            "n_routed_experts": REMOVED,
            "num_local_experts": REMOVED,
            "n_group": REMOVED,
            "topk_group": REMOVED,
            "rms_norm_eps": 3e-4,
        },
    ),
    Case(
        "nemotron_h-moe",
        "nemotron_h",
        "experts",
        NEMOTRON_EXPERTS,
        {"num_hidden_layers": 5, "hybrid_override_pattern": "MEM*E", "rms_norm_eps": 3e-4},
    ),
    Case(
        "nemotron_h-latent",
        "nemotron_h",
        "experts on latent vectors",
        {**NEMOTRON_EXPERTS, "moe_latent_size": 64},
        {"num_hidden_layers": 5, "hybrid_override_pattern": "MEM*E", "rms_norm_eps": 3e-4},
    ),
]
