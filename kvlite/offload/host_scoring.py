"""Choosing on the host: scores, masks and indices leave the device, and with them their workspace.

Source: "KV-X: Optimizing Memory Efficiency in LLMs for Long-Sequence Inference", section 3.4
("CPU offloading for attention scores, masks and weights in the attention unit"); its section 6
names 64-bit indices as what this costs there, which do not exist on the device here.

What goes over the wire: scores up in float32, since what is kept must be what the device would
keep, and with half precision now and then it is not (docs/benchmarks.md); indices down in int32,
widened a block at a time where they are gathered by. Masks are made where logits are and go
nowhere. A layer's choice cannot wait for the next layer's computation: until it is made, all of the
layer stays on the device, which is more than all of this saves. So copies overlap with what is
computed within the layer.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from kvlite.methods.placement import Logits, ScoringBackend

IN_FLIGHT = 2
ELEMENTS_AT_ONCE = 1 << 20

HOST = torch.device("cpu")


@dataclass
class _Flight:
    """A copy under way: from a device's tensor, by way of a buffer, to the host's."""

    source: Tensor
    staged: Tensor
    target: Tensor
    done: torch.cuda.Event | None


class HostTransfer:
    """Copies between a device and the host, in order, two of them under way at a time.

    From CUDA they run on a stream of their own, through pinned buffers, while the device goes on.
    On a CPU, where both are the same memory, the same buffers are filled and emptied.

    Attributes:
        to_host, back: bytes that were copied.
        buffers: the host's side of copies under way, as large as the largest so far.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated before something is sent."""
        self.device = device
        self.pinned = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.pinned else None
        self.to_host = 0
        self.back = 0
        self.buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(IN_FLIGHT)]
        self._flights: deque[_Flight] = deque()
        self._sent = 0

    def send(self, source: Tensor, target: Tensor) -> int:
        """Begin to copy a device's tensor; if two are under way, after the first of them is there.

        Args:
            source: contiguous, held until it is there.
            target: the host's, of the same shape and dtype; not to be read before `arrive`.

        Returns:
            A ticket for `arrive`.
        """
        if len(self._flights) == IN_FLIGHT:
            self._land()
        size = source.numel() * source.element_size()
        slot = self._sent % IN_FLIGHT
        if self.buffers[slot].numel() < size:
            self.buffers[slot] = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        staged = self.buffers[slot][:size].view(source.dtype).view(source.shape)
        self._flights.append(_Flight(source, staged, target, self._copy(source, staged)))
        self._sent += 1
        self.to_host += size
        return self._sent

    def arrive(self, ticket: int | None = None) -> None:
        """Wait until what a ticket was given for is there, or everything."""
        while self._flights and (ticket is None or self._sent - len(self._flights) < ticket):
            self._land()

    def fetch(self, source: Tensor) -> Tensor:
        """A copy of a device's tensor on the host, in pieces of a few megabytes."""
        target = torch.empty(source.shape, dtype=source.dtype)
        for line, own in zip(_lines(source), _lines(target), strict=True):
            for piece, place in zip(
                line.split(ELEMENTS_AT_ONCE), own.split(ELEMENTS_AT_ONCE), strict=True
            ):
                self.send(piece, place)
        self.arrive()
        return target

    def give(self, indices: Tensor) -> Tensor:
        """Indices of the host's on the device, int32."""
        narrow = indices.to(torch.int32)
        self.back += narrow.numel() * narrow.element_size()
        if self.pinned:
            narrow = narrow.pin_memory()
        return narrow.to(self.device, non_blocking=self.pinned)

    def _copy(self, source: Tensor, staged: Tensor) -> torch.cuda.Event | None:
        if self.stream is None:
            staged.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            staged.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        return done

    def _land(self) -> None:
        flight = self._flights.popleft()
        if flight.done is not None:
            flight.done.synchronize()
        flight.target.copy_(flight.staged)


class HostScores(ScoringBackend):
    """Attention of a block of rows is formed on the device and added up there; one number an entry
    and KV head leaves it, and is pooled, compared and sorted on the host.

    Attributes:
        host_transfer: what was copied.
        seconds: spent in choosing, the device's part included.
    """

    frugal = True

    def __init__(self, device: torch.device) -> None:
        """For a model on `device`."""
        self.host_transfer = HostTransfer(device)
        self.seconds = 0.0

    def scores(self, scores: Tensor) -> Tensor:
        """Theirs on the host, float32."""
        return self.host_transfer.fetch(scores)

    def slots(self, slots: Tensor) -> Tensor:
        """As int32."""
        return self.host_transfer.give(slots)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts."""
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - began


class HostSoftmax(HostScores):
    """Logits leave the device a part at a time, as they are formed; all else is done on the host.

    A block's softmax is taken while the last parts of the next are under way.
    """

    def place(self, device: torch.device) -> torch.device:
        """The host."""
        return HOST

    def attention(self, blocks: Iterable[Logits]) -> Iterator[Tensor]:
        """On the host, one block behind the device."""
        before: tuple[Tensor, int] | None = None
        for block in blocks:
            whole, ticket = torch.empty(block.shape), 0
            for entries, part in block.parts:
                ticket = self.host_transfer.send(part, whole[..., entries])
            if before is not None:
                yield self._softmax(*before)
            before = whole, ticket
        if before is not None:
            yield self._softmax(*before)

    def _softmax(self, logits: Tensor, ticket: int) -> Tensor:
        self.host_transfer.arrive(ticket)
        return logits.softmax(-1)

    def beside(self, tensor: Tensor) -> Tensor:
        """Its copy on the host."""
        return self.host_transfer.fetch(tensor)

    def scores(self, scores: Tensor) -> Tensor:
        """They are there."""
        return scores


def host_scoring_backend(scores: str, device: torch.device) -> HostScores | None:
    """The scoring backend that a user asked for, `host` or `host-softmax`; None to stay on the
    `device`."""
    kinds = {"host": HostScores, "host-softmax": HostSoftmax}
    return None if scores == "device" else kinds[scores](device)


def _lines(tensor: Tensor) -> list[Tensor]:
    """Its last dimension, line by line."""
    if tensor.dim() == 1:
        return [tensor]
    return [line for each in tensor.unbind(0) for line in _lines(each)]
