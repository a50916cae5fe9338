"""The recall tier: everything a conversation has read, in host memory, for the next turn."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlite.cache import KVBits, LayerCache, Selection
from kvlite.cache.front import bytes_held
from kvlite.model.shape import ModelShape

LEAST_ROOM = 64


@dataclass
class Tier:
    """Keys and values of all that was read, whatever the cache dropped of it.

    What was answered is not here: it was drawn from what the cache held, and is read once more
    with the next turn, so that the tier is what reading everything at once would have left.

    Attributes:
        layers: one a layer of the model, each a bank with all KV heads, entries in the order in
            which they were read; of a sliding window as much as it will see again.
        windows: of each layer, None where it sees everything.
        bits: how what is neither among the first entries nor recent is quantized, if it is.
        seen: tokens read.
        judged: by layer `(batch, heads, entries)` float32, what a method that judges entries once
            found, for those that were there to be judged.
    """

    layers: list[LayerCache]
    windows: tuple[int | None, ...]
    bits: KVBits | None
    seen: int = 0
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
        return cls(layers, tuple(shape.windows), bits)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held, filled or not."""
        held = [tensor for layer in self.layers for tensor in layer.tensors]
        return bytes_held([*held, *self.judged.values()])

    def count(self, index: int) -> int:
        """Entries a head of a layer."""
        return self.layers[index].banks[0].used

    def add(self, index: int, layer: LayerCache, new: int) -> None:
        """Take over the `new` entries that a layer read last, from any device; or all it has, as
        long as nothing is here."""
        held = self.layers[index]
        used = held.banks[0].used
        keys, values, positions = layer.last(new if used else layer.banks[0].used)
        new, window = keys.shape[2], self.windows[index]
        if held.banks[0].room < new:
            held = held.resized([used + new + used // 8])
        held.banks[0].append(keys, values, positions)
        if window is not None and used + new > window:
            (bank,) = held.banks
            last = torch.arange(bank.used - window, bank.used).expand(1, len(bank.heads), -1)
            held = LayerCache.gathered([Selection(bank, last)], [window])
        elif self.bits is not None:
            held = held.resized([used + new], bits=self.bits)
        self.layers[index] = held

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

    def mark(self) -> list[tuple[LayerCache, int]]:
        """How it stands, for `rewind`."""
        return [(layer, layer.banks[0].used) for layer in self.layers]

    def rewind(self, marks: list[tuple[LayerCache, int]]) -> None:
        """Forget what was added since."""
        for index, (layer, used) in enumerate(marks):
            layer.banks[0].used = used
            self.layers[index] = layer
            if index in self.judged:
                self.judged[index] = self.judged[index][:, :, :used]
