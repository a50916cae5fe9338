"""Recall as part of a step program: everything that changes from token to token is on the device.

The device writes a token's key and value straight into the host store, and reads fetched entries
from there: it addresses both memories alike. The storage has room for the answer as planned; for
what follows, it grows between programs. Its fill is computed from the token's position.
"""

from collections.abc import Sequence

from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache
from kvlite.cache.quantization.hadamard import rotation
from kvlite.offload.kv.recall import Recall, is_ordered
from kvlite.offload.kv.store import INDEXED_AT_ONCE
from kvlite.offload.kv.swap import CANDIDATES, RecallQuery, swap_on_device


def recall_refusal(recall: Recall, index: int, layer: LayerCache) -> str:
    """Why recall in a layer cannot be part of a program, in a few words; "" if it can."""
    source, transfer = recall.store.layers[index], recall.store.transfers.get(layer.keys.device)
    if source.index is None:
        return ""
    head_group = source.head_group
    if transfer is None or not transfer.reads(head_group):
        return "the host KV store is not in pinned memory that the GPU reads"
    if not is_ordered(head_group):
        return "recall has only some of the tokens"
    if not recall.entries:
        return ""
    if any(group.by_entry and not group.has_kernels for group in layer.head_groups):
        return "no kernel quantizes what recall brings back"
    wanted = [recall.count(group.capacity) for group in layer.head_groups]
    if any(count > group.used for count, group in zip(wanted, layer.head_groups, strict=True)):
        return "the cache has fewer entries than a token may want"
    return "" if CANDIDATES * max(wanted) <= head_group.used else "little was read"


class RecallClock:
    """How much was read, as tensors on the device that follow from the token's position.

    Attributes:
        position: of the token, `(1,)` int64.
        places: those of the host store, and one more that no entry has.
        seen: entries of the host store, `(1,)` int64.
        known: entries in the indexes, `(1,)` int64.
    """

    def __init__(self, recall: Recall, position: Tensor) -> None:
        layers = [layer for layer in recall.store.layers if layer.index is not None]
        self.recall, self.position = recall, position
        self.places = 1 + max((layer.head_group.capacity for layer in layers), default=0)
        self._indexed = max((layer.index.used for layer in layers if layer.index), default=0)
        self.tick()

    def tick(self) -> None:
        """Compute the attributes for the position."""
        self.seen = self.position + 1
        self.known = self.seen - (self.seen - self._indexed) % INDEXED_AT_ONCE


class RecallProgram:
    """What recall does with a token in one layer.

    Attributes:
        reached: the head groups that entries come back to.
    """

    def __init__(
        self, clock: RecallClock, index: int, layer: LayerCache, evicts: Sequence[bool]
    ) -> None:
        """For a layer that sees everything, if `recall_refusal` has no reason against it.

        Args:
            evicts: of which head groups a token overwrites an entry.
        """
        self.clock, self.recall, self.position = clock, clock.recall, clock.position
        recall, self.source = self.recall, self.recall.store.layers[index]
        assert self.source.index is not None
        self.index = self.source.index
        self.reached = [
            group
            for group, full in zip(layer.head_groups, evicts, strict=True)
            if recall.reaches(index, group) or (full and recall.wants(group))
        ]
        self.num_fetched = recall.counter(self.position.device)
        for group in self.reached:
            self.mark_free(group)

    def mark_free(self, group: KVHeadGroup) -> None:
        """Let slots that are free have a place that no entry has."""
        nowhere = self.clock.places - 1
        group.residual_positions[:, :, group.residual_len :] = nowhere
        if group.storage is not None:
            group.storage.positions[:, :, group.segment_len :] = nowhere

    @property
    def room(self) -> int:
        """Tokens that can still go through: none once the layer was full and another took its
        place."""
        return self.source.room

    def tell(self, keys: Tensor, values: Tensor, queries: Tensor, scale: float) -> Tensor | None:
        """Write the token, `(1, kv heads, 1, dim)`, to the host store, where it does not count yet.

        Returns:
            As `Recall.scores`, for every entry that there is room for and `nowhere`; None if
            nothing is fetched anyway.
        """
        # torch brings triton along on CUDA alone.
        from kvlite.ops.triton_tell import tell
        from kvlite.ops.triton_topk import search

        index, clock, held = self.index, self.clock, self.source.head_group
        asked = queries if self.reached else None
        host = values, held.residual_keys, held.residual_values
        turn = rotation(keys.shape[3], keys.device)
        turned = tell(index, turn, keys, self.position, host, asked, scale)
        if turned is None:
            return None
        return search(turned, index.signs, index.sizes, clock.known, clock.places)

    def bring_back(
        self,
        group: KVHeadGroup,
        packed: Tensor | None,
        queries: Tensor,
        scale: float,
        scores: Tensor,
        *,
        writes: bool,
    ) -> None:
        """As `Recall.bring_back`; entries are only looked for unless it `writes`. `packed` is as of
        `DeviceFill`."""
        source, count = self.source.head_group, self.recall.count(group.used)
        query = RecallQuery(queries, scale, scores, source, count)
        given = group, group.residual_keys.shape[2], query, self.clock.seen, self.num_fetched
        swap_on_device(*given, count=packed, writes=writes)

    def advance(self, seen: int) -> None:
        """Count a token that went through, after `seen` others."""
        source = self.source.head_group
        source.residual_positions[:, :, seen] = seen
        source.used += 1
        self.source.count()
        for group in self.reached:
            self.recall.num_requested += self.recall.count(group.used) * len(group.heads)
