"""Checks of a config.json by tables of its keys, before torch is imported.

transformers takes the defaults of its classes where a key is missing, which are those of another
model, and builds what no machine holds. What else is wrong with a config it says itself
(`model.shape.described`).
"""

import json
from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from stat import S_ISREG
from typing import Any

from kvlite.config.checked_file import Damaged, from_json
from kvlite.errors import ModelError
from kvlite.model.architectures import OLDER_KINDS, WRAPPERS, Architecture, architecture

# The largest config.json that is read.
LONGEST = 16 << 20

_NEEDED = "hidden_size num_hidden_layers num_attention_heads vocab_size max_position_embeddings"
# Numbers that are checked where a config has them, besides those that it needs: what scales.
_FACTORS = (
    "attention_factor attention_multiplier attn_scale beta_fast beta_slow embedding_multiplier "
    "factor high_freq_factor llama_4_scaling_beta logit_scale logits_scaling low_freq_factor "
    "query_pre_attn_scalar residual_multiplier rms_norm_eps rope_local_base_freq rope_theta"
)
# And sizes.
_SIZES = (
    "full_attention_interval global_head_dim head_dim n_group num_global_key_value_heads "
    "num_key_value_heads original_max_position_embeddings partial_rotary_factor sliding_window "
    "vocab_size_per_layer_input"
)
# All are above 0, but for these.
_FROM_ZERO = (
    *("first_k_dense_replace", "hidden_size_per_layer_input"),
    *("num_kv_shared_layers", "sliding_window"),
)
# Up to well beyond every published model, by parts of names: a plan of more takes minutes.
MOST_LAYERS, LARGEST = 1_000, 1 << 30
_MOST = {
    "partial_rotary_factor": 1,
    "layers": MOST_LAYERS,
    "num_inputs": MOST_LAYERS,
    "heads": 1 << 14,
    "experts": 1 << 14,
    "": LARGEST,
}


def parsed(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError, NotADirectoryError if there is no file;
    ModelError if it cannot be read, is too long, or no JSON object."""
    try:
        about = path.stat()
        if not S_ISREG(about.st_mode) or about.st_size > LONGEST:
            held = f"{about.st_size:,} bytes long" if S_ISREG(about.st_mode) else "not a file"
            raise ModelError(f"{path} is {held}, which no config is: get the model's own")
        config = from_json(path.read_bytes())
    except Damaged as error:
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
    """The architecture a config names. Raises ModelError if it names none."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise _fault(path, config, "model_type", "it must be the architecture's name")
    return kind


def language_part(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config of a wrapper's language model, what it may leave out filled in; any other config
    as it is. Raises ModelError if it has no such part, or weights that were quantized, which cannot
    be loaded in part."""
    known = WRAPPERS.get(require_model_type(config, path))
    if known is None:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise _fault(path, config, "text_config", "it must describe the language model")
    if config.get("quantization_config") is not None:
        wanted = "of such a model only unquantized weights can be loaded in part"
        raise _fault(path, config, "quantization_config", wanted)
    return {**known, **text}


def require_sound(config: Mapping[str, Any], path: Path) -> None:
    """Check what sizes and rotations depend on: that nothing needed is missing, and that each is
    what a model may have. Raises ModelError that names the file, the key, the value and what would
    be right."""
    own = architecture(require_model_type(config, path))
    config, needed = _as_used(config, own)
    for key in needed:
        whole, _, part = key.partition(".")
        held = config.get(whole)
        if whole not in config or (part and not (isinstance(held, dict) and part in held)):
            raise _fault(path, config, key, "a plan without it would be one of another model")
        if held is None and key != "q_lora_rank":
            raise _fault(path, config, key, "it must be a number")
    _require_values(path, config, {*needed, *_FACTORS.split(), *_SIZES.split()})
    known = ("full_attention", *(own.recurrent or [own.short_sight[0]]))
    older = OLDER_KINDS if own.recurrent else {}
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if not isinstance(kind, str) or older.get(kind, kind) not in known:
            wanted = f"{_shown(kind)} is none of {', '.join(known)}"
            raise _fault(path, config, "layer_types", wanted)
    count, chosen, groups = (
        each if isinstance(each := config.get(key), int) else 0
        for key in (own.experts, "num_experts_per_tok", "n_group")
    )
    if count and chosen > count:
        wanted = f"there are {count} experts ({own.experts})"
        raise _fault(path, config, "num_experts_per_tok", wanted)
    if groups and count % groups:
        raise _fault(path, config, "n_group", f"it must divide {own.experts}, which is {count}")
    if isinstance(stored := config.get("quantization_config"), dict):
        # kvlite has weights of these names, which are others.
        for key, wanted in (("bnb_4bit_quant_type", "nf4 or fp4"), ("quant_method", "a library's")):
            if stored.get(key) in ("int4", "gguf"):
                raise _fault(path, stored, key, f"it must be {wanted}", "quantization_config.")


def _as_used(config: Mapping[str, Any], own: Architecture) -> tuple[dict[str, Any], list[str]]:
    config = {**config, **{key: config[known] for key, known in own.known_as if known in config}}
    needed = [*_NEEDED.split(), own.width, *own.needs.split()]
    kinds, width = config.get("layer_types"), config.get(own.width)
    if own.recurrent and kinds is None:
        needed.append(own.layout)
    needed += [key for key, other in own.needs_unless if config.get(other) is None]
    if own.layout == "hybrid_override_pattern" and isinstance(kinds, list):
        config = {"num_hidden_layers": len(kinds), **config}
    if own.dense(config):
        config = {key: value for key, value in config.items() if "_experts" not in key}
        needed = [key for key in needed if not key.startswith("moe_")]
    elif own.experts:
        # An architecture may use the others' name.
        for name in ("num_local_experts", "num_experts"):
            if name in config:
                config = {own.experts: config[name], **config}
        needed += [own.experts, "num_experts_per_tok"]
    if own.carries and isinstance(width, list) and width and all(type(n) is int for n in width):
        config = {**config, own.width: max(width)}  # one for each layer
    return config, needed


def _require_values(
    path: Path, config: Mapping[str, Any], keys: Collection[str], prefix: str = ""
) -> None:
    """Types are checked by transformers."""
    for key, value in config.items():
        if isinstance(value, dict) and (prefix or key.startswith("rope_")):
            _require_values(path, value, keys, f"{prefix}{key}.")  # of each kind of layers
        elif key in keys and isinstance(value, int | float):
            most = next(most for part, most in _MOST.items() if part in key)
            fits = value <= most or (key in _FACTORS.split() and value < inf)
            if not (fits and (value > 0 or (value == 0 and key in _FROM_ZERO))):
                lower = "from 0" if key in _FROM_ZERO else "above 0"
                raise _fault(path, config, key, f"it must be {lower}, and at most {most:,}", prefix)


def _fault(
    path: Path, config: Mapping[str, Any], key: str, wanted: str, prefix: str = ""
) -> ModelError:
    name = prefix + key
    has = f"says {name} is {_shown(config[key])}" if key in config else f"has no {name}"
    return ModelError(f"{path} {has}: {wanted}; get the model's own {path.name}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
