"""Entries of a head group whose keys and values are quantized."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlite.cache.bits import KVBits
from kvlite.cache.quantization.hadamard import Hadamard
from kvlite.cache.quantization.vectors import QuantizedVectors
from kvlite.cache.segment import Places, Write
from kvlite.ops.heads import of_heads


@dataclass(frozen=True)
class Packed:
    """The middle of a head group, between its first few entries and its recent ones, which are
    exact. Each entry was rounded once, when it left the recent ones, and can be replaced; it is
    rounded again only if a cut made it one of the first or the recent ones in between.

    Attributes:
        keys: minus `mean`.
        values: as they are; of latents (MLA) the very object that has the keys, in their bits.
        positions: `(batch, heads, entries)` int32.
        mean: `(batch, heads, dim)` float32, of the keys when the first were packed. Subtracting it
            shifts all products with a query equally; this is undone, exactly. For latents it is 0.
        bits: how they were quantized.
        storage: what this is the beginning of, where more may follow in place.
    """

    keys: QuantizedVectors
    values: QuantizedVectors
    positions: Tensor
    mean: Tensor
    bits: KVBits
    storage: "Packed | None" = None

    @classmethod
    def empty(cls, count: int, mean: Tensor, bits: KVBits, *, latent: bool) -> "Packed":
        """Room for `count` entries a head, of keys centered by `mean`, `(batch, heads, dim)`
        float32; `latent` if an entry is one vector, its key and its value."""
        batch, heads, dim = mean.shape
        shape, device = (batch, heads, count, dim), mean.device
        keys = values = bits.of_keys.vectors.empty(shape, bits.keys, bits.group, device)
        if not latent:
            values = bits.of_values.vectors.empty(shape, bits.values, bits.group, device)
        positions = torch.empty(shape[:3], dtype=torch.int32, device=device)
        return cls(keys, values, positions, mean, bits)

    @property
    def latent(self) -> bool:
        """Whether an entry is one vector, its key and its value."""
        return self.values is self.keys

    @property
    def count(self) -> int:
        """Entries a head."""
        return self.positions.shape[2]

    @property
    def start(self) -> int:
        return self.bits.sinks

    @property
    def packed(self) -> "Packed":
        return self

    @property
    def for_kernels(self) -> tuple[Hadamard, Hadamard]:
        """Keys and values in the form that kernels read."""
        assert isinstance(self.keys, Hadamard) and isinstance(self.values, Hadamard)
        return self.keys, self.values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.keys.tensors, *self.values.tensors, self.positions, self.mean

    @property
    def capacity(self) -> int:
        """Entries a head that there is storage for."""
        return self.count if self.storage is None else self.storage.count

    def first(self, count: int) -> "Packed":
        """The first entries of this storage, seen there; others may follow."""
        keys = self.keys.first(count)
        values = keys if self.latent else self.values.first(count)
        return Packed(keys, values, self.positions[:, :, :count], self.mean, self.bits, self)

    def with_room(self, count: int) -> "Packed":
        """A copy in storage with room for so many more, whole groups."""
        mean, latent = self.mean, self.latent
        storage = Packed.empty(self.count + count, mean, self.bits, latent=latent)
        storage.copy_first(self)
        return storage.first(self.count)

    def arrays(self) -> tuple[Any, ...]:
        """What compiled loops take, of one sequence on a CPU: codes, scales and zeros of keys and
        of values, positions, mean, all that there is storage for; how many count. Scales and zeros
        are the 16 bits that they are."""
        whole = self.storage or self
        sides = (
            array
            for side in whole.for_kernels
            for array in (
                side.codes.numpy()[0],
                side.scales.numpy()[0].view(np.uint16),
                side.zeros.numpy()[0].view(np.uint16),
            )
        )
        return *sides, whole.positions.numpy()[0], self.mean.numpy()[0], self.count

    def write(self, part: slice, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Round entries, `(batch, heads, n, dim)` and `(batch, heads, n)`, into n of the places."""
        self.keys.write(part, keys.float() - self.mean[:, :, None])
        if not self.latent:
            self.values.write(part, values)
        self.positions[:, :, part] = positions

    def putting(
        self, places: Tensor, keys: Tensor, values: Tensor, positions: Tensor, where: Tensor
    ) -> Write:
        """Round one entry a head, `(batch, heads, dim)` at positions `(batch, heads)` int32, to go
        into `places`, only `where` that is True, both `(batch, heads)`."""
        sides = [self.keys.putting(places, keys.float() - self.mean, where)]
        if not self.latent:
            sides.append(self.values.putting(places, values, where))
        index = places[..., None]
        held = self.positions.gather(2, index)
        placed = torch.where(where[..., None], positions[..., None], held)

        def write() -> None:
            for side in sides:
                side()
            self.positions.scatter_(2, index, placed)

        return write

    def replacing(self, at: Places, keys: Tensor, values: Tensor, positions: Tensor) -> Write:
        """Round entries, `(n, dim)` with positions `(n,)`, to go into n places."""
        batch, heads, _ = at
        sides = [self.keys.replacing(at, keys.float() - self.mean[batch, heads])]
        if not self.latent:
            sides.append(self.values.replacing(at, values))

        def write() -> None:
            for side in sides:
                side()
            self.positions[at] = positions

        return write

    def clear(self, part: slice) -> None:
        """Let a part be 0."""
        for side in (self.keys, self.values):
            side.clear(part)

    def copy_first(self, others: "Packed") -> None:
        """Let the first entries be others, unchanged."""
        into = self.first(others.count)
        for mine, theirs in zip(into.tensors, others.tensors, strict=True):
            mine.copy_(theirs)

    def copy(self, part: slice, others: "Packed", where: Tensor) -> None:
        """Copy others unchanged into a part, `where` `(batch, heads, entries)` is True."""
        self.keys.copy(part, others.keys, where)
        if not self.latent:
            self.values.copy(part, others.values, where)
        own = self.positions[:, :, part]
        own.copy_(torch.where(where, others.positions, own))

    def take(self, places: Tensor, heads: list[int]) -> "Packed":
        """An unchanged copy of some entries: `places` `(batch, heads, n)` of some heads."""
        keys = self.keys.take(places, heads)
        return Packed(
            keys,
            keys if self.latent else self.values.take(places, heads),
            of_heads(self.positions, heads).gather(2, places),
            of_heads(self.mean, heads).clone(),
            self.bits,
        )

    def write_keys(self, out: Tensor) -> None:
        for part in self.keys.blocks():
            out[:, :, part] = self.keys.read(part) + self.mean[:, :, None]

    def write_values(self, out: Tensor) -> None:
        for part in self.values.blocks():
            out[:, :, part] = self.values.read(part)

    def dot(self, queries: Tensor) -> Tensor:
        return self.keys.dot(queries) + queries @ self.mean[..., None]

    def weigh(self, weights: Tensor) -> Tensor:
        return self.values.weigh(weights)
