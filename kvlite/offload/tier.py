"""The recall tier: everything a conversation has read, in host memory, for the next turn."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlite.cache import KVBits, LayerCache, Selection
from kvlite.cache.front import bytes_held
from kvlite.model.shape import ModelShape
from kvlite.offload.index import Index

INDEXED_AT_ONCE = 16

Mark = tuple[list[LayerCache], list[int], dict[int, Index]]


@dataclass
class Tier:
    """Keys and values of all that was read, whatever the cache dropped of it.

    What is answered is added for as long as the answer goes on: it was drawn from what the cache
    held, and is read once more with the next turn, so that the tier is then what reading
    everything at once would have left.

    Attributes:
        layers: one a layer of the model, each a bank with all KV heads, entries in the order in
            which they were read; of a sliding window as much as it will see again.
        windows: of each layer, None where it sees everything.
        bits: how what is neither among the first entries nor recent is quantized, if it is.
        seen: tokens read.
        read: by layer, how many of its entries were read; the others were answered since.
        indexes: of layers that see everything, on their devices, for answers.
        judged: by layer `(batch, heads, entries)` float32, what a method that judges entries once
            found, for those that were there to be judged.
    """

    layers: list[LayerCache]
    windows: tuple[int | None, ...]
    bits: KVBits | None
    seen: int = 0
    read: list[int] = field(default_factory=list)
    indexes: dict[int, Index] = field(default_factory=dict)
    judged: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, shape: ModelShape, dtype: torch.dtype, bits: KVBits | None) -> "Tier":
        """Nothing yet, for one sequence.

        Args:
            dtype: of the model's keys and values.
        """
        sizes, host = [(tuple(range(shape.kv_heads)), 0)], torch.device("cpu")
        layers = [
            LayerCache(sizes, batch=1, dim=shape.head_dim, dtype=dtype, device=host)
            for _ in range(shape.layers)
        ]
        return cls(layers, tuple(shape.windows), bits, read=[0] * shape.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held, filled or not."""
        held = [tensor for layer in self.layers for tensor in layer.tensors]
        return bytes_held([*held, *self.judged.values()])

    @property
    def index_bytes(self) -> int:
        """Bytes of the layers' devices that indexes take."""
        return sum(index.nbytes for index in self.indexes.values())

    def add(self, index: int, layer: LayerCache, energy: Tensor, new: int, reserve: int) -> None:
        """Take over the `new` entries that a layer read last, from any device; or all it has, as
        long as nothing is here.

        Args:
            energy: squares of its queries, summed, `(batch, kv heads, dim)` float32.
            reserve: entries that the answer may add.
        """
        held, used = self.layers[index], self.read[index]
        held.banks[0].used = used
        keys, values, positions = layer.last(new if used else layer.banks[0].used)
        new, window = keys.shape[2], self.windows[index]
        if held.banks[0].room < new + reserve:
            held = held.resized([used + new + reserve + used // 8])
        held.banks[0].append(keys, values, positions)
        if window is not None and used + new > window:
            (bank,) = held.banks
            last = torch.arange(bank.used - window, bank.used).expand(1, len(bank.heads), -1)
            held = LayerCache.gathered([Selection(bank, last)], [window])
        elif self.bits is not None:
            held = held.resized([used + new + reserve], bits=self.bits)
        self.layers[index], self.read[index] = held, held.banks[0].used
        if window is None:
            self.indexes[index] = self._indexed(index, keys, energy, reserve)

    def _indexed(self, index: int, keys: Tensor, energy: Tensor, reserve: int) -> Index:
        """A layer's index with new keys in it."""
        known = self.indexes.get(index)
        if known is None:
            return Index.of(keys, energy, reserve)
        return known.extended(self.read[index] - keys.shape[2], keys, reserve)

    def answer(self, index: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Add a token of an answer, `(batch, kv heads, 1, dim)`, to a layer that sees all."""
        if index in self.indexes:
            layer, found = self.layers[index], self.indexes[index]
            layer.banks[0].append(keys, values, positions)
            if layer.banks[0].used - found.used == INDEXED_AT_ONCE:
                found.add(layer.last(INDEXED_AT_ONCE)[0])

    def judge(self, index: int, found: Tensor) -> None:
        """Remember what a method found of all entries of a layer, `(batch, heads, entries)`
        float32."""
        self.judged[index] = found.to("cpu", copy=True)

    def restored(
        self, index: int, room: int, device: torch.device, *, judged: bool = False
    ) -> LayerCache:
        """All that a layer has read, on a device, with `room` for more.

        Args:
            judged: with what a method found of it for a row to remember.
        """
        source = self.layers[index]
        (bank,) = source.banks
        bank.used = self.read[index]
        layer = LayerCache(
            [(bank.heads, bank.used + room)],
            batch=source.keys.shape[0],
            dim=source.keys.shape[2],
            dtype=source.keys.dtype,
            device=device,
            decode_rows=int(judged),
        )
        (made,), every = layer.banks, slice(0, bank.used)
        keys, values = made.own_keys[:, :, every], made.own_values[:, :, every]
        if bank.front is None:
            keys.copy_(bank.own_keys[:, :, every])
            values.copy_(bank.own_values[:, :, every])
        else:
            bank.write_out(keys, values)
        made.own_positions[:, :, every] = bank.positions[:, :, every].to(device)
        made.used = bank.used
        if made.rows is not None and index in self.judged:
            found = self.judged[index]
            made.rows[:, :, 0, : found.shape[2]] = found.to(device)
        return layer

    def mark(self) -> Mark:
        """How it stands, for `rewind`."""
        return list(self.layers), list(self.read), dict(self.indexes)

    def rewind(self, mark: Mark) -> None:
        """Forget what was read since, and the answer before."""
        self.layers, self.read, self.indexes = mark
        for index, used in enumerate(self.read):
            self.layers[index].banks[0].used = used
            if index in self.indexes:
                self.indexes[index].used = used
            if index in self.judged:
                self.judged[index] = self.judged[index][:, :, :used]
