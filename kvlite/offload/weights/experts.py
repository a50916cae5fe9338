"""Experts of streamed layers: those that tokens are routed to are copied to the device, and the
most used ones of all layers stay there.

The device has one stack of memory for each parameter of an expert. The experts of all layers are
bound to these stacks, so that an expert is computed from wherever it lies.

Every token goes through all layers in order, so the least recently used expert is often the next
one to be used. If not all experts fit, the most frequently used ones stay, instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvlite.memory.meter import aside
from kvlite.model.experts import experts_of, stacked, take_one_by_one
from kvlite.model.files import Stored
from kvlite.offload.weights.buffers import FileReader, Layout, Place, laid_out, pinned_pieces


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        module: transformers' module.
        places: of its stacked parameters; their memory offsets mean nothing here.
        chosen: how many experts a token goes through.
    """

    module: Any
    places: list[Place]
    chosen: int

    @property
    def count(self) -> int:
        """The number of experts."""
        return self.places[0].shape[0]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(place.nbytes for place in self.places) // self.count


def apart(layer: nn.Module, layout: Layout, chosen: int) -> tuple[Layout, list[ExpertLayer]]:
    """The layout of a layer without its experts, and its experts, of which a token goes through
    `chosen`. A layer of the engine may be several of the model."""
    known = {id(place.parameter): place for place in layout.places}
    found = [
        ExpertLayer(module, [known.pop(id(parameter)) for parameter in stacked(module)], chosen)
        for module in experts_of(layer)
    ]
    return (laid_out(known.values()) if found else layout), found


@dataclass(frozen=True)
class Resident:
    """The part of streamed layers that is on the device.

    Attributes:
        experts: number of experts, of all layers; never fewer than two layers have.
        layers: whether the other weights of all layers stay, not only of two.
    """

    experts: int = 0
    layers: bool = False


LEAST = Resident()


class ExpertsInMemory:
    """Experts in host memory, pinned if possible."""

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        """Copy them from their parameters, which are emptied."""
        self.layers = [[_taken(place) for place in layer.places] for layer in layers]

    def bring(self, layer: int, expert: int, rows: Sequence[Tensor]) -> None:
        """Fill memory on the device with an expert's parameters."""
        for row, pieces in zip(rows, self.layers[layer], strict=True):
            piece, at = divmod(expert, len(pieces[0]))
            row.copy_(pieces[piece][at], non_blocking=True)


def _taken(place: Place) -> list[Tensor]:
    pieces = pinned_pieces(place.parameter.data)
    place.parameter.data = place.nothing
    return pieces


class ExpertsInFiles:
    """Experts that stay in safetensors files: for each layer, the stored parts of its places."""

    def __init__(self, layers: Sequence[Sequence[list[Stored]]], device: torch.device) -> None:
        self.layers = layers
        every = (part for layer in layers for parts in layer for part in parts)
        self.reader = FileReader(every, device)

    def bring(self, layer: int, expert: int, rows: Sequence[Tensor]) -> None:
        """Likewise. Raises ModelError if they can no longer be read."""
        for row, parts in zip(rows, self.layers[layer], strict=True):
            own = _numbers_of(parts, expert * row.numel(), row.numel())
            self.reader.read(own, row.view(-1))
        self.reader.require_unchanged()


def _numbers_of(parts: Sequence[Stored], first: int, count: int) -> list[Stored]:
    found = []
    for part in parts:
        begin, end = max(first, 0), min(first + count, part.count)
        if begin < end:
            size = (part.end - part.begin) // part.count
            at = part.begin + begin * size
            stop = at + (end - begin) * size
            found.append(replace(part, shape=(end - begin,), begin=at, end=stop))
        first -= part.count
    return found


class ExpertPool:
    """The experts on the device, of all layers.

    Attributes:
        stacks: for each parameter of an expert, `(slots, ...)`.
        uses: `(layers, experts)`, tokens that went through each so far.
        owners: by slot, the layer and the expert that lie there; -1 where none does.
        brought: bytes of experts copied so far.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        source: ExpertsInMemory | ExpertsInFiles,
        device: torch.device,
        experts: int = 0,
    ) -> None:
        """Bind the experts of all layers, which are of one size, to slots on the device: for as
        many `experts`, at least those of two layers. Raises torch.OutOfMemoryError if there is no
        room."""
        slots = max(experts, min(2, len(layers)) * layers[0].count)
        self.layers, self.source, self.brought = layers, source, 0
        self.stacks = [
            torch.empty(slots, *place.shape[1:], dtype=place.dtype, device=device)
            for place in layers[0].places
        ]
        self.uses = np.zeros((len(layers), layers[0].count), dtype=np.int64)
        self.owners = np.full((slots, 2), -1)
        self.used_at, self.now = np.zeros(slots, dtype=np.int64), 0
        self.slots: dict[tuple[int, int], int] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for number, layer in enumerate(layers):
            for place, stack in zip(layer.places, self.stacks, strict=True):
                place.parameter.data = stack
            take_one_by_one(layer.module)
            layer.module.arriving = partial(self.arriving, number)

    @property
    def pass_bytes(self) -> int:
        """Bytes of the experts that a token goes through, in all layers."""
        return sum(layer.expert_bytes * layer.chosen for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(layer.expert_bytes * layer.count for layer in self.layers)

    def arriving(self, layer: int, chosen: Tensor) -> Iterator[tuple[int, int]]:
        """Yields the experts that tokens chose, `(n, top k)` int64, ascending, with the slot of
        each, once it is there."""
        wanted, tokens = (each.tolist() for each in chosen.unique(return_counts=True))
        self.uses[layer, wanted] += tokens
        self.now += 1
        held = [slot for expert in wanted if (slot := self.slots.get((layer, expert))) is not None]
        self.used_at[held] = self.now
        missing = [expert for expert in wanted if (layer, expert) not in self.slots]
        arrived = dict(zip(missing, self._bring(layer, missing, held), strict=True))
        for expert in wanted:
            if (event := arrived.get(expert)) is not None:
                torch.cuda.current_stream(event.device).wait_event(event)
            yield expert, self.slots[layer, expert]

    def _bring(
        self, layer: int, experts: Sequence[int], held: Sequence[int]
    ) -> list["torch.cuda.Event | None"]:
        if not experts:
            return []
        scores = np.where(self.owners[:, 0] < 0, -1, self.uses[tuple(self.owners.T)])
        scores[held] = np.iinfo(np.int64).max
        into = np.lexsort((self.used_at, scores))[: len(experts)].tolist()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return [self._put(layer, *each) for each in zip(experts, into, strict=True)]

    def _put(self, layer: int, expert: int, slot: int) -> "torch.cuda.Event | None":
        self.slots.pop(tuple(self.owners[slot].tolist()), None)
        self.owners[slot] = -1  # nothing, if this is interrupted
        rows = [stack[slot] for stack in self.stacks]
        with aside(), torch.cuda.stream(self.stream):
            self.source.bring(layer, expert, rows)
        self.owners[slot], self.used_at[slot] = (layer, expert), self.now
        self.slots[layer, expert] = slot
        self.brought += self.layers[layer].expert_bytes
        return None if self.stream is None else self.stream.record_event()
