"""The one attention function transformers calls; it hands everything to whoever runs the layer.

The engine passes itself down as the keyword `kvlite` of the decoder layer, so there is no global
state and no cache object of transformers' in between.
"""

from typing import Any, Protocol

from torch import Tensor

ATTENTION = "kvlite"


class Attender(Protocol):
    """Who runs a layer: takes its queries, keys and values, and knows what else to attend to."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Attention output `(batch, heads, L, dim)` for rotated q and the new, unrepeated
        k and v `(batch, kv heads, L, dim)`."""
        ...


def register_attention() -> None:
    """Make `attn_implementation="kvlite"` known to transformers; harmless to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kvlite: Attender,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    out = kvlite.attend(query, key, value, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None
