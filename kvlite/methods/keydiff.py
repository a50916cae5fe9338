"""KeyDiff: keys unlike the others, chosen without any query."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from kvlite.methods.base import Needs
from kvlite.methods.scored import Scored
from kvlite.methods.scores import Window

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import KVHeadGroup


@dataclass(frozen=True)
class KeyDiff(Scored):
    """Keeps the keys that point away from the mean direction of all keys of their head.

    Source: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments", section 3. The paper evicts block by block as it reads;
    here a layer's keys are all there when it is cut, so they are judged once and together.
    """

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "keeps the keys least like the others; needs no attention"
    paper: ClassVar[str] = (
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
        "Resource-Constrained Environments, section 3"
    )

    @cached_property
    def needs(self) -> Needs:
        """Keys alone are looked at."""
        return replace(super().needs, attention=False)

    def ends(self, budget: int) -> tuple[int, int]:
        """The last token, which the next ones follow."""
        return 0, 1

    def score(self, head_groups: "Sequence[KVHeadGroup]", window: Window) -> "list[Tensor]":
        """Cosine distance from the mean direction, `(batch, heads, used)`."""
        return [
            1 - _to_mean(head_group.keys[:, :, : head_group.used].float())
            for head_group in head_groups
        ]


def _to_mean(keys: "Tensor") -> "Tensor":
    """Cosine between each key and the mean of all keys' directions."""
    import torch.nn.functional as F

    directions = F.normalize(keys, dim=-1)
    return F.cosine_similarity(directions, directions.mean(2, keepdim=True), dim=-1)
