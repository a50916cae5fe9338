"""Tiny models whose weights are the same to the last bit wherever they are made: whole numbers of
Python's and torch's integer generators, divided by powers of two. No library's sampling of floats
decides a fingerprint, or a recorded answer."""

from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.conftest import ARCHITECTURES

from . import probe

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
SLIDING = {"sliding_window": 24}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, **SLIDING}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Parameters of one dimension that transformers draws.
_DRAWN = ("A_log", "dt_bias", "sinks", "router.bias")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
# Trims what was said, as Gemma's does, so that an answer in a later prompt differs from the tokens
# that were generated.
TRIMMING = CHATML.replace("message['content'] ", "message['content'] | trim ")


def _own(name: str, **sizes: Any) -> tuple[str, str | None, dict[str, Any]]:
    """A tiny model that other tests have, too, with the vocabulary of this one's tokenizer."""
    kind, given = ARCHITECTURES[name]
    return kind, CHATML, {**given, **sizes}


MODELS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "llama": ("LlamaConfig", CHATML, {}),
    "small-llama": ("LlamaConfig", CHATML, SMALL),
    "mistral": ("MistralConfig", None, SLIDING),
    "qwen2": ("Qwen2Config", CHATML, {}),
    "qwen3": ("Qwen3Config", CHATML, {"head_dim": 16}),
    "qwen3-moe": ("Qwen3MoeConfig", CHATML, {"head_dim": 16, **EXPERTS}),
    "gemma2": ("Gemma2Config", TRIMMING, {**GEMMA, **ALTERNATING}),
    "gemma3": ("Gemma3TextConfig", TRIMMING, {**GEMMA, **ALTERNATING}),
    "phi3": ("Phi3Config", CHATML, {"sliding_window": None}),
    "mixtral": ("MixtralConfig", CHATML, {"num_local_experts": 4, "sliding_window": None}),
    "gemma3n": _own("gemma3n", vocab_size_per_layer_input=264),
    "gemma4": _own("gemma4"),
    "gemma4-e": _own("gemma4-e", vocab_size_per_layer_input=264),
    "llama4": _own("llama4"),
    "deepseek-v3": _own("deepseek-v3"),
    "gpt-oss": _own("gpt-oss"),
    "qwen3-next": _own("qwen3-next"),
    "qwen3-5": _own("qwen3-5", mtp_num_hidden_layers=1),
    "granite-hybrid": _own("granite-hybrid"),
    "nemotron-h": _own("nemotron-h"),
    "lfm2": _own("lfm2"),
}


def make_model(name: str, folder: Path) -> Path:
    """Save one of `MODELS` to a folder, with a tokenizer of one token a byte."""
    kind, template, sizes = MODELS[name]
    config = getattr(transformers, kind)(**{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    state = {key: _weights(key, value) for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    model.save_pretrained(folder)
    if sizes.get("mtp_num_hidden_layers"):
        file = folder / "model.safetensors"
        head = {key: _weights(key, value) for key, value in probe.mtp_parameters(model).items()}
        save_file({**load_file(file), **head}, file, {"format": "pt"})
    _tokenizer(template).save_pretrained(folder)
    return folder


def _weights(name: str, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    whole = torch.randint(-(2**15), 2**15, like.shape, generator=generator)
    if like.dim() > 1:
        return (whole / 2**16).to(like.dtype)  # from -0.5 to 0.5
    if name.endswith(_DRAWN):
        like = torch.ones_like(like)
    return like + (whole / 2**18).to(like.dtype)  # norms and biases, near what they begin as


def _tokenizer(template: str | None) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {each: number for number, each in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    named = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    made.add_special_tokens([*named.values()])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)
    tokenizer.chat_template = template
    return tokenizer
