"""CUDA's streams and events, for copies that arrive only when somebody waited for them."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class LateCopy:
    """A copy to the host, made once; until then its target is nonsense."""

    def __init__(self, target: Tensor, numbers: Tensor) -> None:
        self.target, self.numbers = target, numbers
        target.view(-1).view(torch.uint8).fill_(0xFF)

    def __call__(self) -> None:
        self.target.copy_(self.numbers)
        self.target = self.numbers = torch.empty(0)


class Watching(Protocol):
    """The device that streams are of."""

    @property
    def stream(self) -> "Stream": ...
    def waits_for(self, what: str) -> None: ...


class Stream:
    """Copies to the host that are queued on it, in order."""

    device_on: Watching

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = device
        self.queued: list[Callable[[], None]] = []

    def arrive(self) -> None:
        while self.queued:
            self.queued.pop(0)()

    def synchronize(self) -> None:
        Stream.device_on.waits_for("a stream")
        self.arrive()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.queued.append(event.arrive)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Event:
    """What was queued on a stream when it was recorded."""

    def __init__(self, **_: Any) -> None:
        self.stream, self.queued = Stream(), list[Callable[[], None]]()

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or Stream.device_on.stream
        self.queued = [*self.stream.queued]

    def arrive(self) -> None:
        for each in self.queued:
            each()
        self.stream.queued = [each for each in self.stream.queued if each not in self.queued]
        self.queued = []

    def query(self) -> bool:
        return not self.queued

    def synchronize(self) -> None:
        Stream.device_on.waits_for("an event")
        self.arrive()
