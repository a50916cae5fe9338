"""How a layer turns products of queries and keys into attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Softmax:
    """What a layer's logits go through.

    Attributes:
        scale: multiplies the products.
        softcap: c bends logits to c * tanh(logit / c) (Gemma 2); None leaves them as they are.
        sinks: a learned logit a query head, `(heads,)` float32, that takes part in the denominator
            and has no value (gpt-oss, after "Efficient Streaming Language Models with Attention
            Sinks", section 3.3); None if there are none.
        in_bfloat16: whether a CPU rounds queries, keys, values and attention to bfloat16 before it
            multiplies them; sums are float32.
        in_tiles: whether a kernel sums up attention, tile by tile (`ops.attention.attention_of`).
    """

    scale: float
    softcap: float | None = None
    sinks: "Tensor | None" = None
    in_bfloat16: bool = False
    in_tiles: bool = field(default=False, compare=False)

    def of_heads(self, heads: Sequence[int], kv_heads: int) -> "Softmax":
        """That of the query heads of some of a layer's KV heads."""
        if self.sinks is None:
            return self
        from kvlite.ops.heads import of_heads

        return replace(self, sinks=of_heads(self.sinks.view(1, kv_heads, -1), heads).flatten())

    def capped(self, logits: "Tensor") -> "Tensor":
        """Bend logits within +-softcap, in place."""
        cap = self.softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def probabilities(self, logits: "Tensor") -> "Tensor":
        """Attention along the last dimension of logits, which may be overwritten. Query heads are
        dimension 1, or by KV head 1 and 2."""
        if self.sinks is None:
            return logits.softmax(-1)
        sinks = self.sinks.to(logits.device).view(logits.shape[1], -1, *[1] * (logits.dim() - 3))
        return logits.sub_(logits.logsumexp(-1, keepdim=True).logaddexp(sinks)).exp_()

    def with_sinks(self, out: "Tensor", lse: "Tensor") -> "tuple[Tensor, Tensor]":
        """What the sinks leave of attention over entries, once all of these are merged.

        Args:
            out: `(..., dim)`, attention without sinks.
            lse: float32, its log-sum-exp, in the shape of `out` but for the last dimension; query
                heads are dimension 1, or by KV head 1 and 2.
        """
        if self.sinks is None:
            return out, lse
        whole = lse.logaddexp(self.sinks.view(lse.shape[1], -1))
        return out * (lse - whole).exp()[..., None].to(out.dtype), whole
