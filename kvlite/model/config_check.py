"""Whether a config.json can be of a model: each fault in one sentence, before torch is imported.

transformers takes the defaults of its classes where a key is missing, which are those of another
model, and fails late and in many ways over values that no model has.
"""

import json
from collections.abc import Collection, Mapping
from math import isfinite
from pathlib import Path
from stat import S_ISREG
from typing import Any

from kvlite.errors import ModelError

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
    "sliding_window_pattern": 1_000,
}
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
# Without the key these have as many KV heads as heads; others have those of some other model.
_MAY_LACK_KV_HEADS = ("llama", "phi3")
_EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
_FLAGS = (
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "tie_word_embeddings",
    "use_cache",
    "use_sliding_window",
)
_NUMBERS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_local_base_freq",
    "rope_theta",
)
_DTYPES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double")
_ACTIVATIONS = (
    "silu",
    "gelu_pytorch_tanh",
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "swish",
    "tanh",
)
_LAYERS = ("full_attention", "sliding_attention")
# What transformers would take a part of a larger model's config from.
_PARTS = ("decoder", "generator", "text_config", "text_encoder")
_QUANT_METHODS = (
    "aqlm",
    "auto-round",
    "awq",
    "bitnet",
    "bitsandbytes",
    "compressed-tensors",
    "eetq",
    "fbgemm_fp8",
    "fouroversix",
    "fp8",
    "fp_quant",
    "gemma",
    "gptq",
    "higgs",
    "hqq",
    "metal",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "quanto",
    "quark",
    "sinq",
    "spqr",
    "torchao",
    "vptq",
)
_ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
)
LONGEST = 16 << 20


def parsed(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no file.
        ModelError: it cannot be read, is not JSON, not an object, or too long for a config.
    """
    try:
        about = path.stat()
        if not S_ISREG(about.st_mode) or about.st_size > LONGEST:
            held = f"{about.st_size:,} bytes long" if S_ISREG(about.st_mode) else "not a file"
            raise ModelError(f"{path} is {held}, which no config is: get the model's own")
        config = json.loads(
            path.read_text(encoding="utf-8"),
            parse_constant=_no_constant,
            object_pairs_hook=_each_once,
        )
    except RecursionError:
        raise ModelError(f"{path} is not readable JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}): check its permissions"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not describe a model: it is not a JSON object")
    return config


def require_model_type(config: Mapping[str, Any], path: Path) -> str:
    """What architecture a config names.

    Raises:
        ModelError: it names none.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise _fault(path, config, "model_type", "it must be the architecture's name")
    return kind


def require_sound(config: Mapping[str, Any], path: Path) -> None:
    """Look at everything that sizes and rotations depend on, of an admitted architecture.

    Raises:
        ModelError: a key is missing, or a value is one that no model has; it names the file, the
            key, the value and what would be right.
    """
    kind = require_model_type(config, path)
    needed = [*_NEEDED, *([] if kind in _MAY_LACK_KV_HEADS else ["num_key_value_heads"])]
    if kind in _EXPERTS:
        config = _with_experts(config, _EXPERTS[kind])
        needed += [_EXPERTS[kind], "num_experts_per_tok"]
        needed += ["moe_intermediate_size"] if kind == "qwen3_moe" else []
    for key in needed:
        if key not in config:
            raise _fault(path, config, key, "a plan without it would be one of another model")
    for key, most in MOST.items():
        if config.get(key) is not None or key in needed:
            _require_whole(config, key, path, 1, most)
    _require_fitting(config, kind, path)
    _require_layers(config, path)
    _require_kinds(config, path)
    for key in ("rope_parameters", "rope_scaling"):
        _require_ropes(config, key, path)


def _with_experts(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The config with its experts counted under one of the two names they have."""
    other = next(each for each in _EXPERTS.values() if each != name)
    return {name: config[other], **config} if other in config else config


def _require_fitting(config: Mapping[str, Any], kind: str, path: Path) -> None:
    """What values must be to each other."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        wanted = f"it must divide num_attention_heads, which is {heads}"
        raise _fault(path, config, "num_key_value_heads", wanted)
    head_dim = None if kind == "phi3" else config.get("head_dim")
    if head_dim is None and hidden % heads:
        wanted = f"num_attention_heads, which is {heads}, must divide it where no head_dim is given"
        raise _fault(path, config, "hidden_size", wanted)
    partial = config.get("partial_rotary_factor")
    if partial is not None and not (_is_number(partial) and 0 < partial <= 1):
        raise _fault(path, config, "partial_rotary_factor", "it must be more than 0 and at most 1")
    if (head_dim or hidden // heads) % 2 and partial in (None, 1):
        if head_dim is not None:
            raise _fault(
                path, config, "head_dim", "it must be even, as rotary positions take pairs"
            )
        wanted = f"{heads} heads of it would have an odd size, and rotary positions take pairs"
        raise _fault(path, config, "hidden_size", wanted)
    if kind in _EXPERTS and config["num_experts_per_tok"] > config[_EXPERTS[kind]]:
        wanted = f"there are {config[_EXPERTS[kind]]} experts ({_EXPERTS[kind]})"
        raise _fault(path, config, "num_experts_per_tok", wanted)


def _require_layers(config: Mapping[str, Any], path: Path) -> None:
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if window is not None:
        _require_whole(config, "sliding_window", path, 0, 1 << 30)
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise _fault(path, config, "layer_types", f"it must list one kind for {layers} layers")
        for each in kinds:
            if each not in _LAYERS:
                wanted = f"{_shown(each)} is none of {', '.join(_LAYERS)}"
                raise _fault(path, config, "layer_types", wanted)
    dense = config.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(map(_is_whole, dense))):
        raise _fault(path, config, "mlp_only_layers", "it must be a list of layers' numbers")


def _require_kinds(config: Mapping[str, Any], path: Path) -> None:
    """Values of the right kind, wherever they are there."""
    for key in _FLAGS:
        if not isinstance(config.get(key, False), bool | None):
            raise _fault(path, config, key, "it must be true or false")
    for key in _NUMBERS:
        value = config.get(key)
        if value is not None and not (_is_number(value) and value > 0):
            raise _fault(path, config, key, "it must be a number above 0")
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is not None and value not in _DTYPES:
            raise _fault(path, config, key, f"it must be one of {', '.join(_DTYPES[:3])}")
    used = "hidden_activation" if config["model_type"].startswith("gemma") else "hidden_act"
    for key in ("hidden_act", "hidden_activation"):
        value = config.get(key)
        if value not in _ACTIVATIONS and (value is not None or (key in config and key == used)):
            raise _fault(path, config, key, f"it must be one of {', '.join(_ACTIVATIONS)}")
    for key in _PARTS:
        if config.get(key) is not None:
            raise _fault(path, config, key, "the config of a language model has no such part")
    _require_tokens(config, path)
    if config.get("quantization_config") is not None:
        _require_quantization(config, path)


def _require_tokens(config: Mapping[str, Any], path: Path) -> None:
    padding, vocab = config.get("pad_token_id"), config["vocab_size"]
    if padding is not None and not (_is_whole(padding) and -vocab <= padding < vocab):
        raise _fault(path, config, "pad_token_id", f"it must be one of {vocab:,} tokens")
    first, last = config.get("bos_token_id"), config.get("eos_token_id")
    if first is not None and not _is_whole(first):
        raise _fault(path, config, "bos_token_id", "it must be a token's number")
    if last is not None and not all(map(_is_whole, last if isinstance(last, list) else [last])):
        raise _fault(path, config, "eos_token_id", "it must be a token's number, or a list of them")


def _require_quantization(config: Mapping[str, Any], path: Path) -> None:
    """What a checkpoint's weights were quantized with."""
    key, stored = "quantization_config", config["quantization_config"]
    about = stored if isinstance(stored, dict) else {}
    method, four = about.get("quant_method"), about.get("load_in_4bit") is True
    if four and about.get("load_in_8bit") is True:
        raise _fault(path, config, key, "weights are of 4 bits or of 8, not both")
    if not isinstance(method, str) and not four and about.get("load_in_8bit") is not True:
        raise _fault(path, config, key, "it must be an object that names its quant_method")
    if method is not None and method not in _QUANT_METHODS:
        wanted = f"it must be one of {', '.join(_QUANT_METHODS)}"
        raise ModelError(_said(path, f"{key}.quant_method", method, wanted))
    kind = about.get("bnb_4bit_quant_type", "nf4")
    if kind not in ("nf4", "fp4"):
        raise ModelError(_said(path, f"{key}.bnb_4bit_quant_type", kind, "it must be nf4 or fp4"))
    if method == "gptq" and "bits" not in about:
        raise ModelError(
            f"{path} has no {key}.bits, which gptq needs: get the model's own config.json"
        )
    bits = about.get("bits")
    if bits is not None and not (_is_whole(bits) and 1 <= bits <= 16):
        raise ModelError(_said(path, f"{key}.bits", bits, "it must be a whole number from 1 to 16"))


def _require_ropes(config: Mapping[str, Any], key: str, path: Path) -> None:
    """Rotary positions as they are scaled, in the words of transformers 4 or 5: for all layers, or
    for each kind."""
    ropes = config.get(key)
    if ropes is None:
        return
    if not isinstance(ropes, dict):
        raise _fault(path, config, key, "it must be an object")
    by_kind = {kind: ropes[kind] for kind in _LAYERS if ropes.get(kind) is not None}
    for kind, rope in (by_kind or {"": ropes}).items():
        _require_rope(rope, f"{key}.{kind}" if kind else key, path)


def _require_rope(rope: Any, key: str, path: Path) -> None:
    if not isinstance(rope, dict):
        raise ModelError(_said(path, key, rope, "it must be an object"))
    name = "rope_type" if "rope_type" in rope else "type"
    kind = rope.get(name, "default")
    if not isinstance(kind, str) or kind not in _ROPES:
        known = ", ".join(_ROPES)
        raise ModelError(_said(path, f"{key}.{name}", kind, f"it must be one of {known}"))
    for needed in _ROPES[kind]:
        if rope.get(needed) is None:
            raise ModelError(
                f"{path} has no {key}.{needed}, which rope type {kind!r} needs: get the model's "
                "own config.json"
            )
    for number in _ROPE_NUMBERS:
        value = rope.get(number)
        if value is not None and not (_is_number(value) and value > 0):
            raise ModelError(_said(path, f"{key}.{number}", value, "it must be a number above 0"))
    for factors in ("short_factor", "long_factor"):
        value = rope.get(factors)
        if value is not None and not _are_positive(value):
            wanted = "it must be a list of numbers above 0"
            raise ModelError(_said(path, f"{key}.{factors}", value, wanted))


def _require_whole(config: Mapping[str, Any], key: str, path: Path, least: int, most: int) -> None:
    value = config[key]
    if not _is_whole(value) or not least <= value <= most:
        raise _fault(path, config, key, f"it must be a whole number from {least} to {most:,}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _are_positive(values: Any) -> bool:
    return isinstance(values, Collection) and all(_is_number(each) and each > 0 for each in values)


def _fault(path: Path, config: Mapping[str, Any], key: str, wanted: str) -> ModelError:
    if key in config:
        return ModelError(_said(path, key, config[key], wanted))
    return ModelError(f"{path} has no {key}: {wanted}; get the model's own config.json")


def _said(path: Path, key: str, value: Any, wanted: str) -> str:
    return f"{path} says {key} is {_shown(value)}: {wanted}; get the model's own config.json"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number there")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys mean one thing each."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(
                f"{_shown(key)} is {_shown(found[key])}, and {_shown(value)} further down"
            )
        found[key] = value
    return found
