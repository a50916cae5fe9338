"""Copies between a CUDA device and the tier in host memory, for which neither waits.

On a CPU the same calls copy at once.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from kvlite.cache import Bank, LayerCache
from kvlite.cache.selection import wide
from kvlite.offload.kv.pinned import pieces, pin, reads_pinned


@dataclass(frozen=True)
class Fetched:
    """Entries on the device.

    Attributes:
        keys: `(batch, heads, n, dim)`.
        values: gives those of some of them, `(batch, heads, k, dim)`: takes which of the n,
            `(batch, heads, k)` int64, and where they are needed, `(batch, heads, k)` bool; what is
            not may be anything.
    """

    keys: Tensor
    values: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Arriving:
    """Keys and values of a token on their way to a bank's own slot."""

    bank: Bank
    slot: int
    both: Tensor
    done: torch.cuda.Event | None


class Ferry:
    """What goes to a tier from a device, and back.

    Attributes:
        device: the device.
        pins: whether memory could be pinned so far.
        maps: whether the device reads pinned memory by itself.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated before something is pinned or copied."""
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pins = self.stream is not None
        self.maps = self.pins and find_spec("triton") is not None and reads_pinned(device)
        self._arriving: deque[_Arriving] = deque()

    def pin(self, layer: LayerCache) -> None:
        """Let a layer that is yet to be filled lie in pinned memory, as long as there is any."""
        self.pins = self.pins and pin(layer, self.device)

    def append(self, bank: Bank, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """As `Bank.append` for a bank in host memory that is all exact and has the room, beside
        what the device does next; not to be read before `wait`."""
        count = keys.shape[2]
        own = slice(bank.used, bank.used + count)
        with self._aside():
            _copy(bank.own_keys[:, :, own], keys)
            _copy(bank.own_values[:, :, own], values)
            target = bank.own_positions[:, :, own]
            _copy(target, positions.expand(target.shape))
        bank.used += count

    def restore(self, bank: Bank, made: Bank, count: int) -> None:
        """Copy the first entries of a bank in host memory that is all exact into one on the
        device."""
        for target, source in (
            (made.own_keys, bank.own_keys),
            (made.own_values, bank.own_values),
            (made.own_positions, bank.own_positions),
        ):
            _copy(target[:, :, :count], source[:, :, :count])

    def put(self, bank: Bank, keys: Tensor, values: Tensor, position: int) -> None:
        """Add a token, `(batch, kv heads, 1, dim)` on the device, to a bank in host memory that has
        the room; there once `fetch` or `wait` returned."""
        slot = bank.own_used
        own = slice(slot, slot + 1)
        if self._reads(bank):
            from kvlite.ops.triton_gather import put_rows

            put_rows(keys, bank.own_keys[:, :, own])
            put_rows(values, bank.own_values[:, :, own])
        else:
            self._land(lambda each: each.done is not None and not each.done.query())
            both = torch.stack([keys, values])
            staged = torch.empty(both.shape, dtype=both.dtype, pin_memory=self.stream is not None)
            staged.copy_(both, non_blocking=True)
            self._arriving.append(_Arriving(bank, slot, staged, self._now()))
        bank.own_positions[:, :, own] = position
        bank.used += 1

    def fetch(self, bank: Bank, source: Bank, places: Tensor, slots: Tensor) -> Fetched:
        """Entries of everything, for a bank on the device.

        Where the device reads pinned memory by itself, it takes from there what the bank does not
        hold, and nothing is waited for. Elsewhere the host waits until it knows which entries are
        asked for: once.

        Args:
            source: everything, in host memory, all exact.
            places: which, `(batch, heads of the bank, n)` int64.
            slots: where the bank holds them, -1 if it does not.
        """
        if self._reads(source):
            return _read(bank, source, places, slots)
        named = torch.empty(places.shape, dtype=places.dtype, pin_memory=self.stream is not None)
        named.copy_(places, non_blocking=True)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
        self._land(lambda each: False)
        keys, values = (
            self._gathered(each, bank.heads, named) for each in (source.own_keys, source.own_values)
        )

        def values_of(which: Tensor, needed: Tensor) -> Tensor:
            return values.gather(2, wide(which, values))

        return Fetched(keys, values_of)

    def wait(self) -> None:
        """Until all that goes to the host is there."""
        if self.stream is not None:
            self.stream.synchronize()
            torch.cuda.current_stream(self.device).synchronize()
        self._land(lambda each: False)

    def _gathered(self, source: Tensor, heads: tuple[int, ...], places: Tensor) -> Tensor:
        """Some entries, gathered on the host, on their way to the device."""
        shape, pinned = (*places.shape, source.shape[3]), self.stream is not None
        out = torch.empty(shape, dtype=source.dtype, pin_memory=pinned)
        for sequence, lines in enumerate(out):
            for row, head in enumerate(heads):
                own = source[sequence, head]
                torch.index_select(own, 0, places[sequence, row], out=lines[row])
        return out.to(self.device, non_blocking=True)

    def _reads(self, bank: Bank) -> bool:
        """Whether the device reads and writes a bank in host memory by itself."""
        return self.maps and bank.own_keys.is_pinned() and bank.own_values.is_pinned()

    def _land(self, stays: Callable[[_Arriving], bool]) -> None:
        """Put tokens where they belong, until one `stays` under way."""
        while self._arriving and not stays(self._arriving[0]):
            each = self._arriving[0]
            if each.done is not None:
                each.done.synchronize()
            own = slice(each.slot, each.slot + 1)
            each.bank.own_keys[:, :, own], each.bank.own_values[:, :, own] = each.both
            self._arriving.popleft()

    def _now(self) -> torch.cuda.Event | None:
        """When the device has done all that it was asked for."""
        if self.stream is None:
            return None
        now = torch.cuda.Event()
        now.record(torch.cuda.current_stream(self.device))
        return now

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a stream of their own, after what the device was asked for so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield


def ferry_to(device: torch.device) -> Ferry | None:
    """None for a device whose memory is the host's."""
    return Ferry(device) if device.type == "cuda" else None


def _read(bank: Bank, source: Bank, places: Tensor, slots: Tensor) -> Fetched:
    """Entries that the device reads by itself."""
    # torch brings triton along on CUDA alone.
    from kvlite.ops.triton_gather import gather_rows

    missing = slots < 0
    far = gather_rows(source.own_keys, bank.heads, places, missing)
    near = bank.own_keys.gather(2, wide(slots.clamp(min=0), far))

    def values_of(which: Tensor, needed: Tensor) -> Tensor:
        return gather_rows(source.own_values, bank.heads, places.gather(2, which), needed)

    return Fetched(torch.where(missing[..., None], far, near), values_of)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy `(batch, heads, n, ...)`, a head's run at a time: those are without gaps, and what has
    gaps would be copied twice, and waited for."""
    for own, lines in zip(target, source, strict=True):
        for to, line in zip(own, lines, strict=True):
            flat, given = to.view(-1), line.reshape(-1)
            for part in pieces(given if target.is_cuda else flat):
                flat[part].copy_(given[part], non_blocking=True)
            if given.is_cuda:
                given.record_stream(torch.cuda.current_stream(given.device))
