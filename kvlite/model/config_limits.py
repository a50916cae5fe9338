"""The largest sizes that a config may state."""

# Well beyond every published model; a plan of more takes minutes, or overflows.
MOST = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 30,
    "original_max_position_embeddings": 1 << 30,
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
    "shared_expert_intermediate_size": 1 << 22,
    "no_rope_layer_interval": 1_000,
    "sliding_window_pattern": 1_000,
}
