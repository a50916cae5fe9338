"""TriAttention: scores by distance, from the mean query, and by the length of keys."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvlite.methods.capabilities import FutureQueries, Needs
from kvlite.methods.scored import Scored
from kvlite.methods.scores import Window
from kvlite.methods.types import KVHeadGroup, Tensor


@dataclass(frozen=True)
class TriAttention(Scored):
    """Assumes that a head's queries, before rotation, cluster around a center. Each pair of
    channels that rotates together then contributes a cosine of the distance to a key. The sum of
    these says which distances the head attends to, for distances that double up to `future`. The
    queries' deviation from the center counts by the length of the key.

    The paper takes the centers from another text, once per model; here they are those of this
    turn's queries, so nothing has to be calibrated. The paper leaves the prompt alone and cuts
    while answering, after every 128 tokens. Here the prompt is cut, its last token always stays,
    and the cache grows while answering until the next turn. Channels that are not rotated count by
    their center alone.

    Attributes:
        future: the furthest of the next positions 1, 2, 4, ... ahead, within the model's context.
        heads: how the standardized scores of a KV head's query heads are combined.
    """

    name = "triattention"
    summary = "keeps what the mean query looks at from any distance"
    paper = "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, section 4"

    future: int = 65536
    heads: Literal["max", "mean"] = "max"

    at_least = {"future": 1}
    window = 1

    @cached_property
    def needs(self) -> Needs:
        ahead = tuple(1 << power for power in range(self.future.bit_length()))
        return Needs(future_queries=FutureQueries(ahead))

    def score(self, head_group: KVHeadGroup, window: Window) -> Tensor:
        """The sum over frequencies, standardized over entries for each query head."""
        import torch

        from kvlite.model.rotary import pair_lengths
        from kvlite.ops.attention import grouped

        assert window.expected is not None
        mean = grouped(window.expected.mean, window.kv_heads)
        spread = grouped(window.expected.spread, window.kv_heads)
        scores, stored = [], head_group.keys
        for index, head in enumerate(head_group.heads):
            keys = stored[:, index, : head_group.used].float()
            lengths = pair_lengths(keys, spread.shape[-1])
            each = keys @ mean[:, head].mT + lengths @ spread[:, head].mT
            each -= each.mean(1, keepdim=True)
            each /= each.std(1, correction=0, keepdim=True).clamp_min(1e-6)
            scores.append(each.amax(-1) if self.heads == "max" else each.mean(-1))
        return window.beside(torch.stack(scores, 1))
