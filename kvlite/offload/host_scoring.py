"""Choosing entries on the host: scores, indices and the working memory for them leave the device.

Source: "KV-X: Optimizing Memory Efficiency in LLMs for Long-Sequence Inference", section 3.4
("CPU offloading for attention scores, masks and weights in the attention unit"); its section 6
names 64-bit indices as the cost there, which do not exist on the device here.

Scores are sent in float32: the selection must be the same as the device's, and in half precision
it sometimes is not (docs/benchmarks.md). Indices come back in int32, and are widened a block at a
time for gathering. Masks are made where logits are. Copies overlap with computation only within a
layer: if selection waited for the next layer's computation, the whole layer would stay on the
device until then, which is more than all of this saves.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvlite.methods.placement import Logits, ScoringBackend
from kvlite.ops.softmax import Softmax

IN_FLIGHT = 2
ELEMENTS_AT_ONCE = 1 << 20

HOST = torch.device("cpu")


@dataclass
class _Flight:
    """A copy under way from a device's tensor, through a buffer, to the host's."""

    source: Tensor
    staged: Tensor
    target: Tensor
    done: torch.cuda.Event | None


class HostTransfer:
    """Copies between a device and the host, in order, with at most two under way.

    From CUDA they run on a separate stream, through pinned buffers, while the device continues. On
    a CPU the same buffers are filled and emptied. Nothing is allocated before the first copy.

    Attributes:
        to_host, back: bytes copied.
        buffers: for the copies under way, as large as the largest so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.pinned else None
        self.to_host = 0
        self.back = 0
        self.buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(IN_FLIGHT)]
        self._flights: deque[_Flight] = deque()
        self._sent = 0

    def send(self, source: Tensor, target: Tensor) -> int:
        """Begin to copy a contiguous tensor, which is kept alive until it has arrived, to one on
        the host, of the same shape and dtype, not to be read before `arrive`. If two copies are
        under way, wait for one first. Returns a ticket for `arrive`."""
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
        """Wait for the copy with this ticket, or for all."""
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
        """Copy the host's indices to the device, in int32."""
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
    """Attention is computed and summed on the device; one score per entry and KV head goes to the
    host, where scores are pooled, compared and sorted.

    Attributes:
        seconds: spent in selecting, including the device's part.
    """

    frugal = True

    def __init__(self, device: torch.device) -> None:
        self.host_transfer = HostTransfer(device)
        self.seconds = 0.0

    def figures(self) -> dict[str, Any]:
        """The fields of `GenerationMetrics` about what the host scored."""
        sent = self.host_transfer
        moved = {"score_bytes_to_host": sent.to_host, "score_bytes_back": sent.back}
        return {**moved, "score_s": self.seconds}

    def scores(self, scores: Tensor) -> Tensor:
        return self.host_transfer.fetch(scores)

    def slots(self, slots: Tensor) -> Tensor:
        return self.host_transfer.give(slots)

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - began


class HostSoftmax(HostScores):
    """Logits leave the device in parts, as they are computed; the host does everything else.

    A block's softmax is computed while the last parts of the next are under way.
    """

    def place(self, device: torch.device) -> torch.device:
        return HOST

    def attention(self, blocks: Iterable[Logits]) -> Iterator[Tensor]:
        before: tuple[Tensor, int, Softmax] | None = None
        for block in blocks:
            whole, ticket = torch.empty(block.shape), 0
            for entries, part in block.parts:
                ticket = self.host_transfer.send(part, whole[..., entries])
            if before is not None:
                yield self._softmax(*before)
            before = whole, ticket, block.softmax
        if before is not None:
            yield self._softmax(*before)

    def _softmax(self, logits: Tensor, ticket: int, softmax: Softmax) -> Tensor:
        self.host_transfer.arrive(ticket)
        return softmax.probabilities(logits)

    def to_scoring_device(self, tensor: Tensor) -> Tensor:
        return self.host_transfer.fetch(tensor)

    def scores(self, scores: Tensor) -> Tensor:
        return scores


def host_scoring_backend(scores: str, device: torch.device) -> HostScores | None:
    """The backend of the setting `host` or `host-softmax`; None for `device`."""
    kinds = {"host": HostScores, "host-softmax": HostSoftmax}
    return None if scores == "device" else kinds[scores](device)


def _lines(tensor: Tensor) -> list[Tensor]:
    if tensor.dim() == 1:
        return [tensor]
    return [line for each in tensor.unbind(0) for line in _lines(each)]
