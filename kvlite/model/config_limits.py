"""What a config may state: the largest sizes, and words."""

# Well beyond every published model; a plan of more takes minutes, or overflows.
MOST = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "global_head_dim": 1 << 14,
    "num_global_key_value_heads": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "kv_lora_rank": 1 << 14,
    "conv_kernel": 1_000,
    "mamba_d_conv": 1_000,
    "mamba_d_state": 1 << 14,
    "mamba_expand": 1_000,
    "mamba_n_groups": 1 << 14,
    "mamba_head_dim": 1 << 14,
    "mamba_n_heads": 1 << 14,
    "mamba_num_heads": 1 << 14,
    "moe_shared_expert_intermediate_size": 1 << 22,
    "n_groups": 1 << 14,
    "ssm_state_size": 1 << 14,
    "moe_intermediate_size": 1 << 22,
    "vocab_size": 1 << 26,
    "vocab_size_per_layer_input": 1 << 26,
    "altup_num_inputs": 64,
    "laurel_rank": 1 << 14,
    "max_position_embeddings": 1 << 30,
    "original_max_position_embeddings": 1 << 30,
    "n_group": 1 << 12,
    "n_routed_experts": 1 << 12,
    "n_shared_experts": 1 << 12,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "decoder_sparse_step": 1_000,
    "conv_L_cache": 1_000,
    "full_attention_interval": 1_000,
    "linear_conv_kernel_dim": 1_000,
    "linear_key_head_dim": 1 << 14,
    "linear_num_key_heads": 1 << 14,
    "linear_num_value_heads": 1 << 14,
    "linear_value_head_dim": 1 << 14,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "shared_expert_intermediate_size": 1 << 22,
    "shared_intermediate_size": 1 << 22,
    "no_rope_layer_interval": 1_000,
    "interleave_moe_layer_step": 1_000,
    "intermediate_size_mlp": 1 << 22,
    "attention_chunk_size": 1 << 30,
    "floor_scale": 1 << 30,
    "sliding_window_pattern": 1_000,
    "v_head_dim": 1 << 14,
}
DTYPES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double")
ACTIVATIONS = (
    "silu, gelu_pytorch_tanh, gelu, gelu_fast, gelu_new, gelu_python, mish, quick_gelu, relu, "
    "relu2, relu6, sigmoid, swish, tanh, xielu"
)
QUANT_METHODS = (
    "aqlm, auto-round, awq, bitnet, bitsandbytes, compressed-tensors, eetq, fbgemm_fp8, "
    "fouroversix, fp8, fp_quant, gemma, gptq, higgs, hqq, metal, mxfp4, mxfp8, nvfp4, quanto, "
    "quark, sinq, spqr, torchao, vptq"
)
# Rope types, and what each of them needs.
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
    "proportional": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
