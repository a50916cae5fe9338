"""config.json files as they are published, without what neither sizes nor rotations depend on.

Those of the makers' own repositories, with the keys these have and the values null where they are
so there; old ones have `rope_scaling` and `torch_dtype`, those that transformers 5 saved have
`rope_parameters` and `dtype`.
"""

from typing import Any

_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _config(kind: str, sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), **others}


def _without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _config(
        "llama",
        (4096, 11008, 32, 32, 32, 32000, 4096),
        hidden_act="silu",
        pad_token_id=0,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        tie_word_embeddings=False,
        torch_dtype="float16",
    ),
    "Llama-2-7b, converted in 2023": _without(
        _config("llama", (4096, 11008, 32, 32, 32, 32000, 2048), pad_token_id=-1),
        "num_key_value_heads",
    ),
    "Meta-Llama-3-8B": _config(
        "llama",
        (4096, 14336, 32, 32, 8, 128256, 8192),
        attention_bias=False,
        rope_scaling=None,
        rope_theta=500000.0,
        torch_dtype="bfloat16",
    ),
    "Llama-3.1-8B": _config(
        "llama",
        (4096, 14336, 32, 32, 8, 128256, 131072),
        eos_token_id=[128001, 128008, 128009],
        mlp_bias=False,
        rope_scaling=_LLAMA3,
        rope_theta=500000.0,
    ),
    "Llama-3.1-405B": _config(
        "llama", (16384, 53248, 126, 128, 8, 128256, 131072), rope_scaling=_LLAMA3
    ),
    "Llama-3.2-1B": _config(
        "llama",
        (2048, 8192, 16, 32, 8, 128256, 131072),
        head_dim=64,
        rope_scaling={**_LLAMA3, "factor": 32.0},
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B-Instruct-AWQ-INT4": _config(
        "llama",
        (4096, 14336, 32, 32, 8, 128256, 131072),
        quantization_config={
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        rope_scaling=_LLAMA3,
    ),
    "llama-3-8b-bnb-4bit": _config(
        "llama",
        (4096, 14336, 32, 32, 8, 128256, 8192),
        quantization_config={
            "_load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        },
    ),
    "Mistral-7B-v0.1": _config(
        "mistral",
        (4096, 14336, 32, 32, 8, 32000, 32768),
        rope_theta=10000.0,
        sliding_window=4096,
    ),
    "Mistral-7B-v0.3": _config(
        "mistral",
        (4096, 14336, 32, 32, 8, 32768, 32768),
        rope_theta=1000000.0,
        sliding_window=None,
        torch_dtype="bfloat16",
    ),
    "Mistral-Nemo-2407": _config(
        "mistral",
        (5120, 14336, 40, 32, 8, 131072, 131072),
        head_dim=128,
        rope_theta=1000000.0,
        sliding_window=None,
    ),
    "Mixtral-8x7B-v0.1": _config(
        "mixtral",
        (4096, 14336, 32, 32, 8, 32000, 32768),
        num_experts_per_tok=2,
        num_local_experts=8,
        output_router_logits=False,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
    ),
    "Qwen2-7B": _config(
        "qwen2",
        (3584, 18944, 28, 28, 4, 152064, 131072),
        max_window_layers=28,
        sliding_window=131072,
        use_sliding_window=False,
        rope_theta=1000000.0,
    ),
    "Qwen2.5-0.5B": _config(
        "qwen2",
        (896, 4864, 24, 14, 2, 151936, 32768),
        max_window_layers=24,
        sliding_window=32768,
        tie_word_embeddings=True,
        use_mrope=False,
        use_sliding_window=False,
    ),
    "Qwen2.5-7B-Instruct, stretched": _config(
        "qwen2",
        (3584, 18944, 28, 28, 4, 152064, 32768),
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    ),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": _config(
        "qwen2",
        (3584, 18944, 28, 28, 4, 152064, 32768),
        quantization_config={"bits": 4, "group_size": 128, "quant_method": "gptq", "sym": True},
    ),
    "Qwen3-8B": _config(
        "qwen3",
        (4096, 12288, 36, 32, 8, 151936, 40960),
        head_dim=128,
        max_window_layers=36,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "Qwen3-4B": _config(
        "qwen3", (2560, 9728, 36, 32, 8, 151936, 40960), head_dim=128, rope_theta=1000000
    ),
    "Qwen3-30B-A3B": _config(
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 151936, 40960),
        decoder_sparse_step=1,
        head_dim=128,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
        rope_theta=1000000.0,
        sliding_window=None,
    ),
    "Qwen3-30B-A3B, saved by transformers 5": _config(
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 151936, 40960),
        dtype="bfloat16",
        head_dim=128,
        moe_intermediate_size=768,
        num_local_experts=128,
        num_experts_per_tok=8,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
    ),
    "gemma-2-2b": _config(
        "gemma2",
        (2304, 9216, 26, 8, 4, 256000, 8192),
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        pad_token_id=0,
        query_pre_attn_scalar=256,
        sliding_window=4096,
    ),
    "gemma-2-27b": _config(
        "gemma2",
        (4608, 36864, 46, 32, 16, 256000, 8192),
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        head_dim=128,
        query_pre_attn_scalar=144,
        sliding_window=4096,
        sliding_window_size=4096,
    ),
    "gemma-3-1b-it": _config(
        "gemma3_text",
        (1152, 6912, 26, 4, 1, 262144, 32768),
        attn_logit_softcapping=None,
        eos_token_id=[1, 106],
        final_logit_softcapping=None,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "gemma-3-270m": _config(
        "gemma3_text",
        (640, 2048, 18, 4, 1, 262144, 32768),
        _sliding_window_pattern=6,
        head_dim=256,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
        rope_local_base_freq=10000.0,
        rope_scaling=None,
        rope_theta=1000000.0,
        sliding_window=512,
        use_bidirectional_attention=False,
    ),
    "gemma-3-4b, its text alone": _config(
        "gemma3_text",
        (2560, 10240, 34, 8, 4, 262208, 131072),
        head_dim=256,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
    ),
    "gemma-3-4b, saved by transformers 5": _config(
        "gemma3_text",
        (2560, 10240, 34, 8, 4, 262208, 131072),
        head_dim=256,
        rope_parameters={
            "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        sliding_window=1024,
    ),
    "Phi-3-mini-4k-instruct": _config(
        "phi3",
        (3072, 8192, 32, 32, 32, 32064, 4096),
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        original_max_position_embeddings=4096,
        pad_token_id=32000,
        rope_scaling=None,
        sliding_window=2047,
    ),
    "Phi-3-mini-128k-instruct, of April 2024": _config(
        "phi3",
        (3072, 8192, 32, 32, 32, 32064, 131072),
        original_max_position_embeddings=4096,
        rope_scaling={"long_factor": [1.03] * 48, "short_factor": [1.05] * 48, "type": "su"},
        sliding_window=262144,
    ),
    "Phi-3.5-mini-instruct": _config(
        "phi3",
        (3072, 8192, 32, 32, 32, 32064, 131072),
        original_max_position_embeddings=4096,
        rope_scaling={"long_factor": [1.08] * 48, "short_factor": [1] * 48, "type": "longrope"},
        sliding_window=262144,
    ),
    "Phi-4-mini-instruct": _config(
        "phi3",
        (3072, 8192, 32, 24, 8, 200064, 131072),
        full_attn_mod=1,
        original_max_position_embeddings=4096,
        pad_token_id=199999,
        partial_rotary_factor=0.75,
        rope_scaling={"long_factor": [1.118] * 48, "short_factor": [1] * 48, "type": "longrope"},
        sliding_window=262144,
        tie_word_embeddings=True,
    ),
    "SmolLM2-135M-Instruct": _config(
        "llama",
        (576, 1536, 30, 9, 3, 49152, 8192),
        is_llama_config=True,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        tie_word_embeddings=True,
    ),
    "SmolLM2-1.7B-Instruct": _config(
        "llama", (2048, 8192, 24, 32, 32, 49152, 8192), rope_theta=130000
    ),
}
