"""The host KV store: everything a conversation has read, kept for recall and the next turn."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvlite.cache import KVBits, KVCache, KVHeadGroup, LayerCache, Selection
from kvlite.cache.changes import Change
from kvlite.cache.recurrent import States, copies_of, state_tensors
from kvlite.cache.segment import bytes_held
from kvlite.errors import OutOfMemory, RecallError
from kvlite.memory.device_budget import ERROR
from kvlite.memory.free import free_bytes
from kvlite.memory.meter import aside
from kvlite.model.shape import ModelShape
from kvlite.offload.kv.index import Index
from kvlite.offload.kv.storage import Disk
from kvlite.offload.kv.transfer import KVTransfer, transfer_to

HOST = torch.device("cpu")
# Tokens by which an answer that is longer than planned makes room, at least.
GROWTH = 256
# Entries not in the index yet cannot be found, so that this many recent ones always stay.
INDEXED_AT_ONCE = 16
# Layers that grow get room for another eighth, so that they seldom have to; those in pinned memory
# from the first, as it takes seconds to pin 16 GiB anew.
SPARE = 8


@dataclass
class HostKVLayer:
    """One layer's part.

    Attributes:
        cache: one head group with all KV heads, entries in reading order; for a sliding window only
            those that it will see again.
        window: tokens the layer sees, None for all.
        read: how many entries were read; those after them are from the answer since.
        index: of a layer that sees everything, on the model's device.
        cached_scores: `(batch, heads, read)` float32, from a method that scores entries once.
        scored_by: that method's spec.
        disk: where `cache` is, if not in memory.
    """

    cache: LayerCache
    window: int | None
    read: int = 0
    index: Index | None = None
    cached_scores: Tensor | None = None
    scored_by: str = ""
    disk: Disk | None = None

    @property
    def head_group(self) -> KVHeadGroup:
        """The only head group, with all KV heads."""
        return self.cache.head_groups[0]

    def count(self) -> None:
        """Let the answer's entries count in the index, a few at a time."""
        assert self.index is not None
        self.index.used = self.num_indexed(self.head_group.used, self.index.used)

    def filled_to(self, entries: int, known: int) -> list[Change]:
        """What lets so many entries count, of which the index counted `known` before."""
        assert self.index is not None
        indexed = self.num_indexed(entries, known)
        return [(self.head_group, "used", entries), (self.index, "used", indexed)]

    @staticmethod
    def num_indexed(entries: int, known: int) -> int:
        """How many of so many entries the index counts, of which it counted `known` before."""
        return entries - (entries - known) % INDEXED_AT_ONCE

    @property
    def room(self) -> int:
        """Tokens of an answer that it can still take."""
        assert self.index is not None
        indexed = self.index.capacity - self.head_group.used
        return min(self.head_group.room, indexed)

    def grown(self, more: int, transfer: KVTransfer | None) -> LayerCache:
        """The entries in storage with room for more of the answer, pinned if `transfer` pins any.
        What is quantized stays so, and what is exact stays exact, as the next turn goes back to
        what was read. Raises MemoryError if host memory has no room for another copy."""
        held, own = self.head_group, self.cache
        if own.nbytes * (held.used + more) // held.capacity > (1 - ERROR) * free_bytes(HOST):
            raise MemoryError("an answer grew beyond the host memory that is left")
        cache = own.empty_like([held.used + more], segments=[held.segment])
        if transfer is not None:
            transfer.pin(cache)
        (made,) = cache.head_groups
        made.copy_first(held, held.residual_len)
        made.used = held.used
        return cache

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        reserve: int,
        bits: KVBits | None,
        spare: int,
        transfer: KVTransfer | None,
    ) -> None:
        """Append entries `(batch, kv heads, n, dim)` at positions `(n,)` to those that were read,
        and keep room for `reserve` more, `spare` if the storage has to grow. A `transfer` copies
        from another device without waiting, if entries stay exact and in memory."""
        new, before, own = keys.shape[2], self.cache, bits
        self.head_group.used = self.read  # an earlier attempt may have failed
        if self.window is not None:
            reserve, spare, own, transfer = 0, 0, None, None  # answers do not enter it
        if self.head_group.room < new + reserve:
            size = self.read + new + reserve + spare
            prepare = None if transfer is None else transfer.pin
            self.cache = self.cache.resized([size], bits=own, exact_room=True, prepare=prepare)
        if transfer is None:
            self.head_group.append(keys, values, positions)
        else:
            transfer.append(self.head_group, keys, values, positions)
        if own is not None:
            size = self.read + new + reserve
            self.cache = self.cache.resized([size], bits=own, exact_room=True)
        elif self.window is not None and self.head_group.used > self.window:
            last = torch.arange(self.head_group.used - self.window, self.head_group.used)
            slots = last.expand(keys.shape[0], len(self.head_group.heads), -1)
            self.cache = LayerCache.gathered([Selection(self.head_group, slots)], [self.window])
        if self.cache is not before:
            self.disk = None
        self.read = self.head_group.used


@dataclass
class HostKVStore:
    """Keys and values of everything that was read, including what the cache dropped.

    The answer's entries are there only until the next turn: they were computed from the compressed
    cache, so the next turn reads the answer again. The store is then the same as if everything had
    been read at once.

    Attributes:
        layers: one for each layer of the model.
        bits: how entries other than the first and the recent ones are quantized, if they are.
        seen: tokens read.
        disk: where new entries go, if not to memory.
        spare: whether layers that grow may reserve more than they need.
        transfers: copies from and to devices that have their own memory.
        marked: the layers that `rewind` restores, while something is read.
        states: by layer, the states of the recurrent layers that run with it, after everything
            read; in host memory.
        marked_states: the states that `rewind` restores.
    """

    layers: list[HostKVLayer]
    bits: KVBits | None
    seen: int = 0
    disk: Disk | None = None
    spare: bool = True
    transfers: dict[torch.device, KVTransfer | None] = field(default_factory=dict)
    marked: list[HostKVLayer] = field(default_factory=list)
    states: dict[int, States] = field(default_factory=dict)
    marked_states: dict[int, States] = field(default_factory=dict)

    @classmethod
    def empty(cls, shape: ModelShape, dtype: torch.dtype, bits: KVBits | None) -> "HostKVStore":
        """An empty store for one sequence; `dtype` is that of keys and values."""
        layers = [LayerCache.empty(size, dtype=dtype, device=HOST) for size in shape.kv_sizes]
        return cls([*map(HostKVLayer, layers, shape.window_sizes)], bits)

    @property
    def begun(self) -> bool:
        """Whether anything was read."""
        return self.seen > 0

    @property
    def nbytes(self) -> int:
        """Bytes held for entries, filled or not, in memory or on disk."""
        return bytes_held(self._of_entries)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors held off the device."""
        return [*self._of_entries, *state_tensors(self.states)]

    @property
    def _of_entries(self) -> list[Tensor]:
        held = [tensor for layer in self.layers for tensor in layer.cache.tensors]
        return [*held, *self._cached_scores]

    @property
    def _cached_scores(self) -> list[Tensor]:
        return [each.cached_scores for each in self.layers if each.cached_scores is not None]

    @property
    def index_tensors(self) -> list[Tensor]:
        """All tensors of the indexes, on the device."""
        return [
            each for layer in self.layers if layer.index is not None for each in layer.index.tensors
        ]

    @property
    def cached_score_bytes(self) -> int:
        """Bytes of cached scores, which `nbytes` includes."""
        return bytes_held(self._cached_scores)

    @property
    def on_disk(self) -> bool:
        """Whether any layer is on disk."""
        return any(layer.disk is not None for layer in self.layers)

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes on the device."""
        return sum(tensor.nbytes for tensor in self.index_tensors)

    def add(
        self, index: int, source: LayerCache, query_sq_sum: Tensor, new: int, reserve: int
    ) -> None:
        """Copy the `new` entries that a layer read last, from any device; all it has if the store
        is empty. After an error it may be called again.

        Args:
            query_sq_sum: the sum of its squared queries, `(batch, kv heads, dim)` float32.
            reserve: entries that the answer may add.

        Raises:
            RecallError: the disk is full or fails.
        """
        # A copy, stored at the end: memory may run out in between.
        layer = replace(self.layers[index])
        layer.head_group.used = layer.read
        begun, start = layer.read > 0, layer.read
        held = source.head_groups[0].used
        added = source.last(new if begun else held)
        if layer.window is None and layer.index is None:
            layer.index = Index.of(source.last(held)[0], query_sq_sum, reserve)
        elif layer.window is None and layer.index is not None:
            layer.index = layer.index.extended(start, added[0], reserve)
        self._append(layer, *added, reserve)
        if self.marked and self.bits is None and layer.window is None:
            # The new storage begins with the same entries: the old one is freed.
            self.marked[index].cache, self.marked[index].disk = layer.cache, layer.disk
        self.layers[index] = layer

    def begin(self, cache: KVCache) -> None:
        """Copy all that a cache holds, which has dropped nothing, without an index: the next
        reading makes one. After an error it may be called again."""
        for index, source in enumerate(cache.layers):
            layer = replace(self.layers[index], read=0)
            if source.packed:
                source = source.resized([used for _, used in source.lengths])
            self._append(layer, *source.last(source.head_groups[0].used), 0)
            self.layers[index] = layer
        self.carry(cache.states)
        self.read(cache.seen)

    def _append(
        self, layer: HostKVLayer, keys: Tensor, values: Tensor, positions: Tensor, reserve: int
    ) -> None:
        """Append entries to a layer where the store keeps them: in memory or on disk."""
        transfer = self.transfer(keys.device)
        if self.disk is not None or self.bits is not None:
            transfer = None  # they are read right after
        before = layer.read if transfer is None else layer.read + keys.shape[2]
        spare = before // SPARE if self.spare and self.bits is None else 0
        with aside():
            layer.append(keys, values, positions, reserve, self.bits, spare, transfer)
        if self.disk is not None and layer.disk is None:
            self.disk.take(layer.cache)
            layer.disk = self.disk

    def add_scores(self, index: int, found: Tensor, scored_by: str) -> None:
        """Keep a method's scores of all entries of a layer, `(batch, heads, entries)` float32."""
        with aside():
            self.layers[index].cached_scores = found.to("cpu", copy=True)
        self.layers[index].scored_by = scored_by

    def is_scored_by(self, scored_by: str) -> bool:
        """Whether all layers have complete cached scores by this method."""
        layers = [each for each in self.layers if each.cached_scores is not None]
        pairs = zip(layers, self._cached_scores, strict=True)
        return bool(layers) and all(
            each.scored_by == scored_by and scores.shape[2] == each.read for each, scores in pairs
        )

    def filled(self) -> list[tuple[HostKVLayer, int, int]]:
        """Layers that take an answer, and how many entries each holds and its index counts."""
        layers = (layer for layer in self.layers if layer.index is not None)
        return [(layer, layer.head_group.used, layer.index.used) for layer in layers if layer.index]

    def make_room(self, index: int, count: int = 1) -> None:
        """Let a layer grow if it has no room for `count` tokens: an answer may get longer than was
        planned. After an error it may be called again. Raises MemoryError if there is not enough
        memory, and OutOfMemory if the disk is full or fails."""
        layer = self.layers[index]
        if layer.index is None or layer.room >= count:
            return
        self.wait()
        more = max(GROWTH, layer.head_group.used // SPARE)
        exact = layer.disk is None and self.bits is None
        transfer = self.transfers.get(layer.index.mean.device) if exact else None
        roomier = layer.index.roomier(more)
        with aside():
            cache = layer.grown(more, transfer)
        if layer.disk is not None:
            try:
                layer.disk.take(cache)
            except RecallError as error:
                raise OutOfMemory(str(error)) from None
        self.layers[index] = replace(layer, cache=cache, index=roomier)

    def answer(self, index: int, keys: Tensor, values: Tensor, position: int) -> None:
        """Add the answer's token, `(batch, kv heads, 1, dim)`, to a layer that sees everything."""
        layer = self.layers[index]
        if layer.index is None:
            return
        head_group = layer.head_group
        transfer = self.transfers.get(keys.device)
        if transfer is not None:
            transfer.put(head_group, keys, values, position, layer.index)
            layer.count()
            return
        pending, end = head_group.used - layer.index.used, head_group.residual_len
        if pending + 1 == INDEXED_AT_ONCE:
            before = head_group.residual_keys[:, :, end - pending : end]
            layer.index.add(torch.cat([before, keys], 2))
        head_group.append(keys, values, torch.tensor([position], dtype=torch.int32))

    def forget_answer(self) -> None:
        """Drop the entries of the answer since the last reading."""
        self.wait()
        for layer in self.layers:
            layer.head_group.used = layer.read
            if layer.index is not None:
                layer.index.used = layer.read

    def transfer(self, device: torch.device) -> KVTransfer | None:
        """Copies from and to a device; None if its memory is the host's."""
        if device not in self.transfers:
            self.transfers[device] = transfer_to(device)
        return self.transfers[device]

    def wait(self) -> None:
        """Wait until all copies have arrived."""
        for transfer in self.transfers.values():
            if transfer is not None:
                transfer.wait()

    def restored(
        self,
        index: int,
        room: int,
        device: torch.device,
        scored_by: str = "",
        read: int | None = None,
    ) -> LayerCache:
        """A layer cache on a device with everything the layer has read, or its first `read`
        entries, and `room` for more; its row has the cached scores of the method `scored_by`, if
        any."""
        source, rows = self.layers[index], int(bool(scored_by))
        head_group, count = source.head_group, source.read if read is None else read
        layer = source.cache.empty_like([count + room], decode_rows=rows, device=device)
        (made,), every = layer.head_groups, slice(0, count)
        transfer = self.transfers.get(device)
        if head_group.segment is None and transfer is not None:
            transfer.restore(head_group, made, count)
        elif head_group.segment is None:
            made.copy_first(head_group, count)
        else:
            head_group.write_out(made.residual_keys[:, :, every], made.residual_values[:, :, every])
            made.residual_positions[:, :, every] = head_group.positions[:, :, every].to(device)
        made.used, scores = count, source.cached_scores
        if made.rows is not None and scores is not None and source.scored_by == scored_by:
            made.rows[:, :, 0, : scores.shape[2]] = scores.to(device)
        return layer

    def mark(self) -> None:
        """Begin reading: drop the last answer, and keep the layers for `rewind`. New entries go
        behind theirs, or elsewhere."""
        self.forget_answer()
        self.marked = [replace(layer) for layer in self.layers]
        self.marked_states = self.states

    def rewind(self) -> None:
        """Drop everything read since `mark`."""
        self.wait()
        self.layers, self.marked = self.marked, []
        self.states, self.marked_states = self.marked_states, {}
        self.forget_answer()

    def carry(self, states: Mapping[int, States]) -> None:
        """Copy the states of recurrent layers after the tokens being read, from any device."""
        with aside():
            self.states = copies_of(states, lambda _: HOST)

    def read(self, seen: int) -> None:
        """End reading: all layers hold `seen` tokens, and `rewind` is no longer possible."""
        self.wait()
        self.seen, self.marked, self.marked_states = seen, [], {}
