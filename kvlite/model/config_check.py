"""Checks of a config.json: each fault in one sentence, before torch is imported.

transformers takes the defaults of its classes where a key is missing, which are those of another
model, and fails late and in many ways over values that no model has.
"""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from stat import S_ISREG
from typing import Any

from kvlite.config.checked_file import Damaged, from_json
from kvlite.errors import ModelError
from kvlite.model.architectures import OLDER_KINDS, WRAPPERS, Architecture, architecture
from kvlite.model.config_limits import ACTIVATIONS, DTYPES, MOST, QUANT_METHODS, ROPES
from kvlite.model.config_values import Rule, Values, is_whole, shown

# The largest config.json that is read.
LONGEST = 16 << 20

_NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_LAYERS = ("full_attention", "sliding_attention")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < inf


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_RULES: tuple[Rule, ...] = (
    (
        "attention_bias attn_temperature_tuning mlp_bias norm_topk_prob tie_word_embeddings "
        "use_cache use_qk_norm use_sliding_window",
        lambda value: isinstance(value, bool),
        "it must be true or false",
    ),
    (
        "attention_multiplier attn_logit_softcapping attn_scale embedding_multiplier "
        "final_logit_softcapping layer_norm_eps logit_scale logits_scaling query_pre_attn_scalar "
        "residual_multiplier rms_norm_eps rope_local_base_freq rope_theta swiglu_alpha "
        "swiglu_limit",
        _is_positive,
        "it must be a number above 0",
    ),
    ("dtype torch_dtype", DTYPES.__contains__, f"it must be one of {', '.join(DTYPES[:3])}"),
    (
        "hidden_act hidden_activation mlp_hidden_act",
        lambda value: value in ACTIVATIONS.split(", "),
        f"it must be one of {ACTIVATIONS}",
    ),
    # transformers would take a part of a larger model's config from these.
    (
        "decoder generator text_config text_encoder",
        lambda value: False,
        "the config of a language model has no such part",
    ),
    (
        "hidden_size_per_layer_input",
        lambda value: is_whole(value) and 0 <= value <= 1 << 14,
        "it must be a whole number, 0 where layers have no such input",
    ),
    ("bos_token_id", is_whole, "it must be a token's number"),
    (
        "eos_token_id",
        lambda value: all(map(is_whole, value if isinstance(value, list) else [value])),
        "it must be a token's number, or a list of them",
    ),
)
_QUANT_RULES: tuple[Rule, ...] = (
    (
        "quant_method",
        lambda value: value in QUANT_METHODS.split(", "),
        f"it must be one of {QUANT_METHODS}",
    ),
    ("bnb_4bit_quant_type", ("nf4", "fp4").__contains__, "it must be nf4 or fp4"),
    (
        "bits",
        lambda value: is_whole(value) and 1 <= value <= 16,
        "it must be a whole number from 1 to 16",
    ),
)
_ROPE_RULES: tuple[Rule, ...] = (
    (
        "attention_factor beta_fast beta_slow factor high_freq_factor llama_4_scaling_beta "
        "low_freq_factor original_max_position_embeddings partial_rotary_factor rope_theta",
        _is_positive,
        "it must be a number above 0",
    ),
    (
        "short_factor long_factor",
        lambda value: isinstance(value, list) and all(map(_is_positive, value)),
        "it must be a list of numbers above 0",
    ),
)


def parsed(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no file.
        ModelError: it cannot be read, is too long, or no JSON object.
    """
    try:
        about = path.stat()
        if not S_ISREG(about.st_mode) or about.st_size > LONGEST:
            held = f"{about.st_size:,} bytes long" if S_ISREG(about.st_mode) else "not a file"
            raise ModelError(f"{path} is {held}, which no config is: get the model's own")
        config = from_json(
            path.read_bytes(),
            parse_constant=_no_constant,
            object_pairs_hook=_each_once,
        )
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
        raise Values(config, path).fault("model_type", "it must be the architecture's name")
    return kind


def language_part(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config of a wrapper's language model, what it may leave out filled in; any other config
    as it is.

    Raises:
        ModelError: it has no such part, or weights that were quantized, which cannot be loaded in
            part.
    """
    known = WRAPPERS.get(require_model_type(config, path))
    if known is None:
        return dict(config)
    values = Values(config, path)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise values.fault("text_config", "it must describe the language model")
    if config.get("quantization_config") is not None:
        wanted = "of such a model only unquantized weights can be loaded in part"
        raise values.fault("quantization_config", wanted)
    return {**known, **text}


def require_sound(config: Mapping[str, Any], path: Path) -> None:
    """Check everything that sizes and rotations depend on, for an admitted architecture.

    Raises:
        ModelError: a key is missing, or a value is one that no model has; it names the file, the
            key, the value and what would be right.
    """
    kind = require_model_type(config, path)
    own = architecture(kind)
    config = {**config, **{key: config[known] for key, known in own.known_as if known in config}}
    needed = [*_NEEDED, own.width, *own.needs]
    if own.recurrent and config.get("layer_types") is None:
        needed.append(own.layout)
    needed += [key for key, other in own.needs_unless if config.get(other) is None]
    if own.layout == "hybrid_override_pattern" and isinstance(config.get("layer_types"), list):
        config = {"num_hidden_layers": len(config["layer_types"]), **config}
    if own.dense(config):
        config = {key: config[key] for key in config if "_experts" not in key}
        needed = [key for key in needed if not key.startswith("moe_")]
    elif experts := own.experts:
        # An architecture may use the others' name.
        for name in ("num_local_experts", "num_experts"):
            if name in config:
                config = {experts: config[name], **config}
        needed += [experts, "num_experts_per_tok"]
    if isinstance(config.get("sliding_window_pattern"), str) and config.get("layer_types"):
        # EXAONE says it in letters, too.
        config = {key: config[key] for key in config if key != "sliding_window_pattern"}
    width = config.get(own.width)
    if own.carries and isinstance(width, list) and width and all(map(is_whole, width)):
        config = {**config, own.width: max(width)}  # one for each layer
    values = Values(config, path)
    for key in needed:
        whole, _, part = key.partition(".")
        held = config.get(whole)
        if whole not in config or (part and not (isinstance(held, dict) and part in held)):
            raise values.fault(key, "a plan without it would be one of another model")
    for key, most in MOST.items():
        if config.get(key) is not None or key in needed:
            values.require_whole(key, 1, most)
    _require_fitting(values, kind)
    _require_layers(values, own)
    values.require_all(_RULES)
    vocab = config["vocab_size"]
    values.require(
        "pad_token_id",
        lambda token: is_whole(token) and -vocab <= token < vocab,
        f"it must be one of {vocab:,} tokens",
    )
    activation = "hidden_activation" if kind.startswith("gemma") else "hidden_act"
    if activation in config and config[activation] is None:
        raise values.fault(activation, f"it must be one of {ACTIVATIONS}")
    _require_quantization(values)
    for key in ("rope_parameters", "rope_scaling"):
        values.require(key, _is_object, "it must be an object")
        ropes = Values(config.get(key) or {}, path, f"{key}.")
        kinds = [kind for kind in _LAYERS if ropes.config.get(kind) is not None]
        for kind in kinds:
            ropes.require(kind, _is_object, "it must be an object")
            _require_rope(Values(ropes.config[kind], path, f"{key}.{kind}."))
        if not kinds:
            _require_rope(ropes)


def _require_fitting(values: Values, kind: str) -> None:
    """Check sizes against each other."""
    config = values.config
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if heads % (config.get("num_key_value_heads") or heads):
        wanted = f"it must divide num_attention_heads, which is {heads}"
        raise values.fault("num_key_value_heads", wanted)
    key = "qk_rope_head_dim" if architecture(kind).latent else "head_dim"
    head_dim = None if kind == "phi3" else config.get(key)
    if head_dim is None and hidden % heads:
        wanted = f"num_attention_heads, which is {heads}, must divide it where no head_dim is given"
        raise values.fault("hidden_size", wanted)
    values.require(
        "partial_rotary_factor",
        lambda value: _is_positive(value) and value <= 1,
        "it must be more than 0 and at most 1",
    )
    if (head_dim or hidden // heads) % 2 and config.get("partial_rotary_factor") in (None, 1):
        if head_dim is not None:
            raise values.fault(key, "it must be even, as rotary positions take pairs")
        wanted = f"{heads} heads of it would have an odd size, and rotary positions take pairs"
        raise values.fault("hidden_size", wanted)
    if (config.get("linear_num_value_heads") or 0) % (config.get("linear_num_key_heads") or 1):
        wanted = f"linear_num_key_heads, which is {config['linear_num_key_heads']}, must divide it"
        raise values.fault("linear_num_value_heads", wanted)
    experts = architecture(kind).experts
    if count := config.get(experts):
        wanted = f"there are {count} experts ({experts})"
        values.require("num_experts_per_tok", lambda chosen: chosen <= count, wanted)
        wanted = f"it must divide {experts}, which is {count}"
        values.require("n_group", lambda groups: count % groups == 0, wanted)


def _require_layers(values: Values, own: Architecture) -> None:
    layers, recurrent = values.config["num_hidden_layers"], own.recurrent
    if values.config.get("sliding_window") is not None:
        values.require_whole("sliding_window", 0, 1 << 30)
    values.require(
        "layer_types",
        lambda kinds: isinstance(kinds, list) and len(kinds) == layers,
        f"it must list one kind for {layers} layers",
    )
    known = ("full_attention", *(recurrent or [own.short_sight[0]]))
    kinds = values.config.get("layer_types") or ()
    if recurrent:
        kinds = [OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in known:
            raise values.fault("layer_types", f"{shown(kind)} is none of {', '.join(known)}")
    if kinds and all(kind in recurrent for kind in kinds):
        raise values.fault("layer_types", "one of them must have attention")
    shared = values.config.get("num_kv_shared_layers")
    if shared is not None:
        values.require_whole("num_kv_shared_layers", 0, layers - 1)
        if not {*kinds[layers - shared :]} <= {*kinds[: layers - shared]}:
            wanted = "each of these layers needs one of its kind before them, whose keys it takes"
            raise values.fault("num_kv_shared_layers", wanted)
    values.require(
        "full_attn_idxs",
        lambda full: (
            isinstance(full, list) and full != [] and all(n in range(layers) for n in full)
        ),
        f"it must list the numbers of those of {layers} layers that have attention",
    )
    pattern = values.config.get("hybrid_override_pattern")
    values.require(
        "hybrid_override_pattern",
        lambda kinds: isinstance(kinds, str) and len(kinds) == layers and not {*kinds} - {*"ME*-"},
        f"it must have M, E, * and - for {layers} layers",
    )
    if not kinds and pattern and "*" not in pattern:
        raise values.fault("hybrid_override_pattern", f"one of {layers} must have attention")
    if not kinds and (values.config.get("full_attention_interval") or 0) > layers:
        raise values.fault("full_attention_interval", f"one of {layers} must have attention")
    values.require(
        "no_rope_layers",
        lambda turns: (
            isinstance(turns, list)
            and (len(turns) == layers or (own.chunked and not turns))
            and all(each in (0, 1) for each in turns)
        ),
        f"it must be a list of 0 or 1 for each of {layers} layers",
    )
    values.require(
        "moe_layers",
        lambda sparse: isinstance(sparse, list) and all(n in range(layers) for n in sparse),
        f"it must list the numbers of those of {layers} layers that have experts",
    )
    values.require(
        "mlp_only_layers",
        lambda dense: isinstance(dense, list) and all(map(is_whole, dense)),
        "it must be a list of layers' numbers",
    )


def _names_its_method(stored: Any) -> bool:
    about = stored if isinstance(stored, dict) else {}
    loads = any(about.get(key) is True for key in ("load_in_4bit", "load_in_8bit"))
    return loads or isinstance(about.get("quant_method"), str)


def _require_quantization(values: Values) -> None:
    """Check how a checkpoint's weights were quantized."""
    values.require(
        "quantization_config", _names_its_method, "it must be an object that names its quant_method"
    )
    about = values.config.get("quantization_config") or {}
    if about.get("load_in_4bit") is True and about.get("load_in_8bit") is True:
        raise values.fault("quantization_config", "weights are of 4 bits or of 8, not both")
    stored = Values(about, values.path, "quantization_config.")
    stored.require_all(_QUANT_RULES)
    if about.get("quant_method") == "gptq" and "bits" not in about:
        raise stored.fault("bits", "gptq needs it")


def _require_rope(rope: Values) -> None:
    """Check how rotary positions are scaled, in the words of transformers 4 or 5."""
    key = "rope_type" if "rope_type" in rope.config else "type"
    kind = rope.config.get(key, "default")
    if not isinstance(kind, str) or kind not in ROPES:
        raise rope.fault(key, f"it must be one of {', '.join(ROPES)}")
    for needed in ROPES[kind]:
        if rope.config.get(needed) is None:
            raise ModelError(
                f"{rope.path} has no {rope.prefix}{needed}, which rope type {kind!r} needs: get "
                "the model's own config.json"
            )
    rope.require_all(_ROPE_RULES)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number there")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys mean one thing each."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(
                f"{shown(key)} is {shown(found[key])}, and {shown(value)} further down"
            )
        found[key] = value
    return found
