"""Architectures that kvlite was not tested with: whether their layers are of a kind it runs.

Names decide nothing here, the class that transformers builds does: every layer is run on the meta
device, where it has to hand its queries, keys and values to the attention function once. Whether
the numbers are right is asked when the model is loaded (`engine.selfcheck`).
"""

from typing import Any

import torch
from torch import Tensor

from kvlite.cache import KVSize
from kvlite.errors import ModelError, reason

RECORDING = "kvlite-recording"
# What attention is given that kvlite heeds, or that changes nothing where it is None or causal.
_KNOWN = "k v scaling sliding_window softcap s_aux dropout is_causal use_cache position_ids"
_PARTS = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")


def attention_sizes(module: Any) -> tuple[tuple[KVSize, int | None], ...]:
    """Per layer of transformers' model on the meta device, in bfloat16, what it keeps of a token,
    and the length of its window or None. Raises ModelError if its layers are of no kind that kvlite
    runs."""
    from transformers import AttentionInterface

    config = module.config
    for part in _PARTS:
        found: Any = module
        for name in part.split("."):
            found = getattr(found, name, None)
        if found is None:
            raise _unfit(config, f"its class has no {part}")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise _unfit(config, "some of its layers see chunks")
    if not module._supports_attention_backend:
        raise _unfit(config, "its attention cannot be replaced")
    AttentionInterface.register(RECORDING, _record)
    module.set_attn_implementation(RECORDING)
    return tuple(_size(module, layer) for layer in module.model.layers)


def _size(module: Any, layer: Any) -> tuple[KVSize, int | None]:
    hidden = torch.empty(1, 2, module.config.hidden_size, dtype=torch.bfloat16, device="meta")
    given: list[dict[str, Any]] = []
    try:
        with torch.inference_mode():
            at = torch.zeros(1, 2, dtype=torch.int64, device="meta")
            rotation = module.model.rotary_emb(hidden, at)
            out = layer(hidden, position_ids=at, position_embeddings=rotation, kvlite=given.append)
    except Exception as error:  # whatever a class does that nobody here knows
        raise _unfit(module.config, f"its layers do not run: {reason(error)}") from error
    if not isinstance(out, Tensor) or out.shape != hidden.shape or len(given) != 1:
        raise _unfit(module.config, "its layers are not attention and an MLP")
    (found,) = given
    if found["k"].shape != found["v"].shape:
        raise _unfit(module.config, "its keys and values are of different sizes")
    strange = [name for name in found if name not in _KNOWN.split() and found[name] is not None]
    if strange:
        raise _unfit(module.config, f"its attention takes {strange[0]}")
    window, context = found.get("sliding_window"), module.config.max_position_embeddings
    size = KVSize(found["k"].shape[1], found["k"].shape[3])
    return size, window if (window or context) < context else None


def _unfit(config: Any, why: str) -> ModelError:
    return ModelError(
        f"this is a {config.model_type!r} model, which kvlite was not tested with and cannot run: "
        f"{why}"
    )


def _record(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, kvlite: Any, **given: Any
) -> tuple[Tensor, None]:
    kvlite({"k": k, "v": v, **given})
    return q.transpose(1, 2).contiguous(), None
