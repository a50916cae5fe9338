"""Names of types for annotations: what declares a method does without torch."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    import kvlite.cache

Tensor: TypeAlias = "torch.Tensor"
KVHeadGroup: TypeAlias = "kvlite.cache.KVHeadGroup"
LayerCache: TypeAlias = "kvlite.cache.LayerCache"
GroupLength: TypeAlias = "kvlite.cache.GroupLength"
Segment: TypeAlias = "kvlite.cache.CompressedSegment"
Selection: TypeAlias = "kvlite.cache.Selection"

Position: TypeAlias = "int | torch.Tensor"
"""A token's position: a number, or `(1,)` on the device where nothing may wait for it."""
