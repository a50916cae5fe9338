"""transformers' config of a model, from a GGUF file's header alone."""

from typing import Any

from kvlite.errors import ModelError, reason
from kvlite.model.architectures import architecture
from kvlite.model.config_check import LARGEST
from kvlite.model.gguf.architectures import ARCHITECTURES, GGUFArchitecture
from kvlite.model.gguf.header import Header
from kvlite.model.gguf.metadata import Metadata

# Files of these kinds are no language models, or only a part of one.
_OTHERS = {
    "clip": "an image encoder (mmproj), which belongs beside a language model's own file",
    "gemma4-assistant": "a drafter that belongs to a Gemma 4, which kvlite does not use",
}
_KINDS = {"mmproj": _OTHERS["clip"], "adapter": "a LoRA adapter, which belongs to another model"}


def gguf_architecture(header: Header) -> GGUFArchitecture:
    """What is known of a file's architecture. Raises ModelError if kvlite does not run it, or the
    file holds no language model."""
    name, kind = header.architecture, header.fields.get("general.type", "model")
    found = ARCHITECTURES.get(name)
    what = _KINDS.get(kind) if isinstance(kind, str) else None
    if what := what or _OTHERS.get(name):
        raise ModelError(f"{header.paths[0]} is {what}: name the language model's file")
    if found is None:
        raise ModelError(
            f"{header.paths[0]} is a {name!r} model, which kvlite does not run from a GGUF file: "
            f"use its safetensors, if transformers has it; from GGUF it runs "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def model_type(header: Header) -> str:
    """transformers' name of a file's architecture. Raises as `gguf_architecture`."""
    return gguf_architecture(header).name(Metadata(header))


def config_of(header: Header) -> tuple[dict[str, Any], Metadata]:
    """The config, as a config.json has it, and what was read for it. Raises ModelError if something
    is missing that a model needs, cannot be as it is, or is said of the model that kvlite does not
    understand."""
    own, file = gguf_architecture(header), Metadata(header)
    try:
        return _config(own, file), file
    except (ArithmeticError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"{file.path} says of its model what none has ({reason(error)}): get the file again"
        ) from error


def _config(own: GGUFArchitecture, file: Metadata) -> dict[str, Any]:
    header = file.header
    if file.value("attention.causal") in (False, 0):
        raise ModelError(
            f"{file.path} is an embedding model, which answers nothing: name a language model"
        )
    hidden = file.whole("embedding_length")
    if not 0 < hidden <= LARGEST:
        raise file.wrong("embedding_length", "a size is needed")
    heads = file.by_layer("attention.head_count")
    most = max(heads)
    if type(most) is not int or not 0 < most <= hidden:
        raise file.wrong("attention.head_count", "a number of heads is needed")
    if any(each not in (0, most) for each in heads):
        raise file.wrong("attention.head_count", "kvlite needs as many heads in all layers")
    config: dict[str, Any] = {
        "model_type": own.name(file),
        "hidden_size": hidden,
        "num_hidden_layers": file.layers,
        "num_attention_heads": most,
        "head_dim": file.size("attention.key_length", hidden // most),
        "vocab_size": file.rows("token_embd.weight"),
        "max_position_embeddings": file.size("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    tokens = len(header.fields.get("tokenizer.ggml.tokens", ()))
    if tokens > config["vocab_size"]:
        raise ModelError(
            f"{file.path} has {tokens:,} tokens, and embeddings of {config['vocab_size']:,}: get "
            "the file again"
        )
    config["num_key_value_heads"] = max(file.by_layer("attention.head_count_kv", most))
    if file.has("feed_forward_length"):
        config["intermediate_size"] = max(file.by_layer("feed_forward_length"))
    for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        if file.has(f"attention.{key}"):
            name = "rms_norm_eps" if "rms" in key else "layer_norm_eps"
            config[name] = file.number(f"attention.{key}")
    if not config.keys() & {"rms_norm_eps", "layer_norm_eps"}:
        raise file.wrong("attention.layer_norm_rms_epsilon", "norms need it")
    known = architecture(config["model_type"])
    if known.experts and file.whole("expert_count", 0):
        config |= file.read(f"{known.experts}=expert_count num_experts_per_tok=expert_used_count")
    config |= file.read(own.keys) | own.fixed
    if own.rope is not None:
        config["rope_parameters"] = own.rope(file, config)
    config |= own.more(file, config)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = header.fields.get(f"tokenizer.ggml.{key}_token_id")
        is_one = type(token) is int and token < config["vocab_size"]
        config[f"{name}_token_id"] = token if is_one else None
    if unread := file.unread(own.harmless):
        raise ModelError(
            f"{file.path} says {unread[0]} = {header.fields[unread[0]]!r:.60} of its model, which "
            "kvlite does not understand and would answer wrongly without: use another program, or "
            "the model's safetensors"
        )
    return config
