"""CHAI: heads that attend alike share one head's keys."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Needs
from kvlite.methods.full import Full
from kvlite.methods.scores import window_rows
from kvlite.methods.types import Selection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class CHAI(Method):
    """In the upper layers, KV heads whose first tokens attend to the same entries form clusters.
    Each cluster keeps only the first head's keys: all its heads attend as this one does, each to
    its own values. No token is dropped.

    Heads are clustered after the text was read with the full cache; the paper clusters after the
    first tokens. A prompt within the budget is left alone. With grouped queries, the queries of a
    KV head attend as those of its cluster's first KV head do, one by one. Clusters of query heads
    that share a KV head would free nothing, because these share its keys already.

    Attributes:
        start: the depth where clusters begin, from 0 (the first layer) to 1 (none).
        keep: the share of a layer's KV heads that keep their keys.
        first: heads are clustered by the attention of that many first tokens.
    """

    name = "chai"
    summary = "lets alike heads of the upper layers share keys"
    paper = "CHAI: Clustered Head Attention for Efficient LLM Inference, section 3"

    start: float = 0.5625
    keep: float = 0.125
    first: int = 5

    at_least = {"first": 1}
    respects_budget = False  # every token stays

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("start", 0 <= self.start <= 1, "from 0 to 1")
        self.require("keep", 0 < self.keep <= 1, "above 0, up to 1")

    @cached_property
    def needs(self) -> Needs:
        return Needs(first=self.first)

    def for_layer(self, layer: int, layers: int) -> Method:
        return self if layer >= int(self.start * layers) else Full()

    def select(self, view: LayerView) -> list[Selection]:
        """All entries; of a layer with clusters, or of which heads hold different entries, as it
        is."""
        import torch

        from kvlite.cache import Selection

        head_group, *others = view.head_groups
        heads = len(head_group.heads)
        count = ceil(self.keep * heads - 1e-9)
        every = view.opening is not None and head_group.used == view.window.end
        if others or head_group.shares_keys or not every or count == heads:
            return view.keep_all()
        groups = self.clustered(view, count)
        alone = tuple(head for each in groups if len(each) == 1 for head in each)
        slots = torch.arange(head_group.used, device=head_group.positions.device)
        shape = head_group.positions.shape[0], heads, head_group.used
        return [
            Selection(head_group, slots.expand(shape)[:, : len(own)], own, share=shared)
            for own, shared in [(alone, False), *((each, True) for each in groups)]
            if len(own) > shared
        ]

    def clustered(self, view: LayerView, count: int) -> list[tuple[int, ...]]:
        """The heads of a layer's one head group by cosine distance of their first tokens'
        attention, as `clusters`; without numbers, in order."""
        import torch.nn.functional as F

        (head_group,), opening = view.head_groups, view.opening
        assert opening is not None
        seen = replace(head_group, used=head_group.used - (view.window.end - opening.end))
        looks = window_rows(seen, opening).transpose(0, 1).flatten(1)
        if looks.is_meta:
            return [*((head,) for head in range(count - 1)), tuple(range(count - 1, len(looks)))]
        looks = F.normalize(looks.double(), dim=1)
        return clusters((1 - looks @ looks.T).cpu().numpy(), count)


def clusters(distances: "NDArray[np.float64]", count: int) -> list[tuple[int, ...]]:
    """Agglomerative clusters by average linkage: of two clusters at a time, the two with the least
    mean distance of their members become one.

    Args:
        distances: `(n, n)`, symmetric.

    Returns:
        `count` clusters of 0 .. n - 1, each ascending, in order of their first members.
    """
    import numpy as np

    between = distances.copy()
    np.fill_diagonal(between, np.inf)
    members = {each: [each] for each in range(len(between))}
    while len(members) > count:
        one, other = divmod(int(between.argmin()), len(between))
        sizes = len(members[one]), len(members[other])
        mean = (sizes[0] * between[one] + sizes[1] * between[other]) / sum(sizes)
        between[one] = between[:, one] = mean
        between[other] = between[:, other] = between[one, one] = np.inf
        members[one] += members.pop(other)
    return [tuple(sorted(each)) for each in members.values()]
