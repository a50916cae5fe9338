"""Asynchronous copies between a CUDA device and the host store; on a CPU they happen at once."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache
from kvlite.cache.quantized import rotation
from kvlite.offload.kv.index import Index
from kvlite.offload.kv.pinned import pieces, pin, reads_pinned
from kvlite.ops.device import WIDEST


@dataclass(frozen=True)
class _Arriving:
    """Keys and values of a token on their way to a head group's slot."""

    head_group: KVHeadGroup
    slot: int
    both: Tensor
    done: torch.cuda.Event | None


class KVTransfer:
    """Copies from a device to a host store and back. Allocates nothing before it is used.

    Attributes:
        pins: whether all memory could be pinned so far.
        maps: whether the device reads pinned memory itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pins = self.stream is not None
        self.maps = self.pins and find_spec("triton") is not None and reads_pinned(device)
        self._arriving: deque[_Arriving] = deque()

    def pin(self, layer: LayerCache) -> None:
        """Move an empty layer's storage to pinned memory, unless that failed before."""
        self.pins = self.pins and pin(layer, self.device)

    def append(
        self, head_group: KVHeadGroup, keys: Tensor, values: Tensor, positions: Tensor
    ) -> None:
        """Like `KVHeadGroup.append`, for an exact head group in host memory with enough room, while
        the device continues. Do not read it before `wait`."""
        count = keys.shape[2]
        own = slice(head_group.used, head_group.used + count)
        with self._aside():
            _copy(head_group.residual_keys[:, :, own], keys)
            if not head_group.latent:
                _copy(head_group.residual_values[:, :, own], values)
            target = head_group.residual_positions[:, :, own]
            _copy(target, positions.expand(target.shape))
        head_group.used += count

    def restore(self, head_group: KVHeadGroup, made: KVHeadGroup, count: int) -> None:
        """Copy the first entries of an exact head group in host memory into one on the device."""
        _copy(made.residual_keys[:, :, :count], head_group.residual_keys[:, :, :count])
        if not made.latent:
            _copy(made.residual_values[:, :, :count], head_group.residual_values[:, :, :count])
        _copy(made.residual_positions[:, :, :count], head_group.residual_positions[:, :, :count])

    def put(
        self, head_group: KVHeadGroup, keys: Tensor, values: Tensor, position: int, index: Index
    ) -> None:
        """Append a token, `(batch, kv heads, 1, dim)` on the device, to a head group in host memory
        that has the room, and write it into the head group's index, where it does not count yet; it
        is there after the next `fetch` or `wait`."""
        slot = head_group.residual_len
        own = slice(slot, slot + 1)
        if self.reads(head_group):
            # torch brings triton along on CUDA alone.
            from kvlite.ops.triton_tell import tell

            host = values, head_group.residual_keys, head_group.residual_values
            tell(index, rotation(keys.shape[3], keys.device), keys, slot, host)
        else:
            index.put(keys, head_group.used)
            self._land(lambda each: each.done is not None and not each.done.query())
            both = torch.stack([keys, values])
            staged = torch.empty(both.shape, dtype=both.dtype, pin_memory=self.stream is not None)
            staged.copy_(both, non_blocking=True)
            self._arriving.append(_Arriving(head_group, slot, staged, self._now()))
        head_group.residual_positions[:, :, own] = position
        head_group.used += 1

    def fetch(
        self, source: KVHeadGroup, heads: tuple[int, ...], places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `(batch, heads, n, dim)`, on the device, of the entries at `places`
        `(batch, heads, n)` int64 of some KV heads of an exact source in host memory; the host waits
        once, for `places`."""
        named = torch.empty(places.shape, dtype=places.dtype, pin_memory=self.stream is not None)
        named.copy_(places, non_blocking=True)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
        self._land(lambda each: False)
        keys = self._gathered(source.residual_keys, heads, named)
        if source.latent:
            return keys, keys
        return keys, self._gathered(source.residual_values, heads, named)

    def wait(self) -> None:
        """Wait until all copies to the host have arrived."""
        if self.stream is not None:
            self.stream.synchronize()
            torch.cuda.current_stream(self.device).synchronize()
        self._land(lambda each: False)

    def _gathered(self, source: Tensor, heads: tuple[int, ...], places: Tensor) -> Tensor:
        shape, pinned = (*places.shape, source.shape[3]), self.stream is not None
        out = torch.empty(shape, dtype=source.dtype, pin_memory=pinned)
        for sequence, lines in enumerate(out):
            for row, head in enumerate(heads):
                own = source[sequence, head]
                torch.index_select(own, 0, places[sequence, row], out=lines[row])
        return out.to(self.device, non_blocking=True)

    def reads(self, head_group: KVHeadGroup) -> bool:
        """Whether a head group in host memory is exact, and the device can read and write it
        directly."""
        return (
            self.maps
            and head_group.residual_keys.shape[3] <= WIDEST
            and head_group.segment is None
            and head_group.residual_keys.is_pinned()
            and head_group.residual_values.is_pinned()
        )

    def _land(self, stays: Callable[[_Arriving], bool]) -> None:
        while self._arriving and not stays(self._arriving[0]):
            each = self._arriving[0]
            if each.done is not None:
                each.done.synchronize()
            own = slice(each.slot, each.slot + 1)
            keys, values = each.both
            each.head_group.residual_keys[:, :, own] = keys
            each.head_group.residual_values[:, :, own] = values
            self._arriving.popleft()

    def _now(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        now = torch.cuda.Event()
        now.record(torch.cuda.current_stream(self.device))
        return now

    @contextmanager
    def _aside(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield


def transfer_to(device: torch.device) -> KVTransfer | None:
    """A transfer for a device; None if the device uses host memory."""
    return KVTransfer(device) if device.type == "cuda" else None


def _copy(target: Tensor, source: Tensor) -> None:
    # Heads are contiguous; other copies would go through a buffer, and wait.
    for own, lines in zip(target, source, strict=True):
        for to, line in zip(own, lines, strict=True):
            flat, given = to.view(-1), line.reshape(-1)
            for part in pieces(given if target.is_cuda else flat):
                flat[part].copy_(given[part], non_blocking=True)
            if given.is_cuda:
                given.record_stream(torch.cuda.current_stream(given.device))
