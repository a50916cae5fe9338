"""An index of one bit per channel of every key: which entries may the next token attend to?"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.cache.quantization.affine import packed_codes, unpacked_codes
from kvlite.cache.quantization.hadamard import rotation
from kvlite.cache.segment import blocks
from kvlite.ops.device import has_compiled, has_triton

WORD = 64
# So few keys, an answer's, are added by a compiled loop; a prompt does not wait for a compiler.
FEW = 64


@dataclass
class Index:
    """Signs of a layer's keys, minus their mean, balanced and rotated, on the layer's device.

    Attributes:
        signs: `(batch, kv heads, capacity, bytes)` uint8, a bit a channel, in words of 64: byte j
            of b has those of channels j, j + b, and so on, the first in the lowest bit.
        sizes: `(batch, kv heads, capacity)` float32, the mean absolute value of a key's channels.
        mean: `(batch, kv heads, dim)` float32, of the first keys that were read. Subtracting it
            shifts all products with a query by the same amount, which changes nothing.
        balance: `(batch, kv heads, dim)` float32; keys are multiplied by it and queries divided, so
            that channels with large queries count for more.
        used: how many keys there are.
    """

    signs: Tensor
    sizes: Tensor
    mean: Tensor
    balance: Tensor
    used: int = 0

    @classmethod
    def of(cls, keys: Tensor, query_sq_sum: Tensor, room: int) -> "Index":
        """An index of keys `(batch, kv heads, n, dim)`, with `room` for more; `query_sq_sum` is the
        sum of squared queries, `(batch, kv heads, dim)` float32."""
        mean = keys.mean(2, dtype=torch.float32)
        own = torch.zeros_like(mean)
        for part in _parts(keys):
            own += (part.float() - mean[:, :, None]).square().sum(2) / keys.shape[2]
        balance = (_floored(query_sq_sum) / _floored(own)).pow(0.25)
        balance /= balance.mean(-1, keepdim=True)
        made = cls(*_room(keys, keys.shape[2] + room), mean, balance)
        made.add(keys)
        return made

    def extended(self, start: int, keys: Tensor, room: int) -> "Index":
        """An index of the first `start` keys and of `keys`; it shares this one's storage, and
        overwrites the rest of it, if there is room."""
        signs, sizes, held = self.signs, self.sizes, self.capacity
        if (wanted := start + keys.shape[2] + room) > held:
            signs, sizes = _room(keys, wanted + held // 8)
            signs[:, :, :start] = self.signs[:, :, :start]
            sizes[:, :, :start] = self.sizes[:, :, :start]
        made = Index(signs, sizes, self.mean, self.balance, start)
        made.add(keys)
        return made

    @property
    def capacity(self) -> int:
        """How many keys it has room for."""
        return self.sizes.shape[2]

    def roomier(self, more: int) -> "Index":
        """The same with room for more keys, in storage of its own; also of those that do not count
        yet."""
        signs, sizes = _room(self.mean[:, :, None], self.capacity + more)
        signs[:, :, : self.capacity], sizes[:, :, : self.capacity] = self.signs, self.sizes
        return Index(signs, sizes, self.mean, self.balance, self.used)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of its tensors."""
        return self.signs, self.sizes, self.mean, self.balance

    def add(self, keys: Tensor) -> None:
        """Append keys `(batch, kv heads, n, dim)`."""
        self.put(keys, self.used)
        self.used += keys.shape[2]

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return _lines(self.signs).view(np.uint64), _lines(self.sizes)

    def turned(self, queries: Tensor, scale: float = 1.0) -> Tensor:
        """Queries `(batch, kv heads, rows, dim)`, scaled, balanced and rotated like the signs,
        float32."""
        turn = rotation(queries.shape[3], queries.device)
        if has_triton(queries.device, queries.shape[3]):
            from kvlite.ops.triton_tell import tell

            made = tell(self, turn, None, 0, queries=queries, scale=scale)
            assert made is not None
            return made
        out: Tensor = queries.float() * scale / self.balance[:, :, None] @ turn
        return out

    def scores(self, queries: Tensor, entries: int, scale: float = 1.0) -> Tensor:
        """Estimated attention: probabilities, averaged over a KV head's queries.

        Args:
            queries: `(batch, kv heads, rows, dim)`.
            scale: what they are multiplied by.
            entries: how many there are, including those not in the index yet.

        Returns:
            `(batch, kv heads, entries)` float32, 0 for those not in the index.
        """
        batch, heads = queries.shape[:2]
        if queries.is_meta:  # allocates what the compiled search does
            return (queries.float() * scale).new_empty(batch, heads, entries)
        if has_compiled(queries.device):
            from kvlite.ops.numba_search import search as compiled

            asked = np.ascontiguousarray(_lines(queries.float() * scale))
            found = compiled(asked, _lines(self.balance), *self._arrays(), self.used, entries)
            return torch.from_numpy(found).view(batch, heads, entries)
        turned, dim = self.turned(queries, scale), queries.shape[3]
        if has_triton(queries.device, queries.shape[3]):
            from kvlite.ops.triton_topk import search

            return search(turned, self.signs, self.sizes, self.used, entries)
        total, logits = turned.sum(-1, keepdim=True), []
        for part in blocks(self.used, batch * heads * dim):
            ones = unpacked_codes(self.signs[:, :, part], 1)[..., :dim]
            logits.append((2 * turned @ ones.mT - total) * self.sizes[:, :, None, part])
        return F.pad(torch.cat(logits, -1).softmax(-1).mean(2), (0, entries - self.used))

    def put(self, keys: Tensor, at: int) -> None:
        """Write keys `(batch, kv heads, n, dim)` from a place on, without counting them."""
        if has_triton(keys.device, keys.shape[3]):
            from kvlite.ops.triton_tell import tell

            tell(self, rotation(keys.shape[3], keys.device), keys, at)
            return
        if keys.dtype == torch.float32 and keys.shape[2] <= FEW and has_compiled(keys.device):
            from kvlite.ops.numba_search import add as compiled

            given = np.ascontiguousarray(_lines(keys)), _lines(self.mean), _lines(self.balance)
            compiled(*given, *self._arrays(), at)
            return
        for part in _parts(keys):
            to = slice(at, at := at + part.shape[2])
            self.signs[:, :, to], self.sizes[:, :, to] = self._signs(part)

    def _signs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        dim = keys.shape[3]
        centered = (keys.float() - self.mean[:, :, None]) * self.balance[:, :, None]
        turned = centered @ rotation(dim, keys.device)
        return packed_codes(F.pad(turned > 0, (0, -dim % WORD)), 1), turned.abs().mean(-1)


def sign_bytes(dim: int) -> int:
    """Bytes of one key's signs."""
    return -(-dim // WORD) * WORD // 8


def _lines(tensor: Tensor) -> np.ndarray:
    array = tensor.numpy()
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _floored(query_sq_sum: Tensor) -> Tensor:
    # Some channels are always 0.
    return torch.maximum(query_sq_sum, 1e-6 * query_sq_sum.mean(-1, keepdim=True) + 1e-12)


def _room(keys: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    (batch, heads, _, dim), device = keys.shape, keys.device
    shape = (batch, heads, capacity, sign_bytes(dim))
    signs = torch.empty(shape, dtype=torch.uint8, device=device)
    return signs, torch.empty(shape[:3], device=device)


def _parts(keys: Tensor) -> Iterator[Tensor]:
    # Of meta tensors two are enough.
    batch, heads, count, dim = keys.shape
    parts = blocks(count, batch * heads * dim)
    return (keys[:, :, part] for part in (islice(parts, 2) if keys.is_meta else parts))
