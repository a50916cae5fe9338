"""Streamed decoder layers: while one layer computes, the next one's weights are copied to the
device.

Layers are accessed in order, once for a whole prompt and once per token of an answer, so two slots
are enough: one layer computes in the first while the next is copied to the second. Experts are
copied when tokens choose them (`experts`); the rest of all layers may be small enough to stay.

Layers may also leave the device when memory runs out, and are then streamed from host memory.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor

from kvlite.errors import ModelError
from kvlite.memory.free import is_oom, release_memory
from kvlite.memory.oom import unless_short
from kvlite.model.layers import Layers, Passing
from kvlite.model.load import LoadedModel
from kvlite.model.weights import MXFP4, PLAIN
from kvlite.offload.weights.buffers import InFiles, InMemory, Layout, copied, lay_out
from kvlite.offload.weights.experts import ExpertPool

SAMPLES = 5


@dataclass
class Slot:
    """Memory of one layer on the device.

    Attributes:
        memory: flat uint8.
        holds: the layer whose weights are there, or on their way.
        arrives: completes when the weights are there; on CUDA when all copies are queued, with an
            event after the last. None after they were waited for.
    """

    memory: Tensor
    holds: int | None = None
    arrives: "Future[torch.cuda.Event | None] | None" = None


class StreamedLayers(Layers):
    """Decoder layers that are copied to the device on access, each followed by the next one; the
    first follows the last.

    Attributes:
        nbytes: of all their weights.
        experts: those on the device, if experts are streamed separately.
        current: the slot of the layer that was accessed last.
        courier: the thread that copies them, one at a time.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        layouts: Sequence[Layout],
        source: InFiles | InMemory,
        device: torch.device,
        setting: str,
        experts: ExpertPool | None = None,
        *,
        stay: bool = False,
    ) -> None:
        """Take over modules with empty parameters, and measure how fast weights come.

        Args:
            layouts: one for each layer, without its `experts`.
            source: its `bring` fills a layer's memory.
            setting: the value of `--stream`.
            stay: let all but experts stay on the device.

        Raises:
            ModelError: the source fails.
        """
        super().__init__(modules)
        self.layouts = layouts
        self.source = source
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        size = max(layout.size for layout in layouts)
        sizes = [layout.size for layout in layouts] if stay else [size] * len(self.modules[:2])
        self.slots = [Slot(torch.empty(n, dtype=torch.uint8, device=device)) for n in sizes]
        self.current: Slot | None = None
        self.courier = ThreadPoolExecutor(1, thread_name_prefix="kvlite-weights")
        self.experts, self._brought = experts, 0
        self.nbytes = passed = sum(layout.nbytes for layout in layouts)
        passed = 0 if stay else passed
        if experts is not None:
            self.nbytes, passed = self.nbytes + experts.nbytes, passed + experts.pass_bytes
        self.passing = Passing(setting, passed, self._measured())
        self._send(self._slot_for(0), 0)

    def __getitem__(self, index: int) -> Any:
        """The transformers module of one layer, ready to run until another is accessed. Raises
        ModelError if its weights can no longer be read."""
        index = range(len(self))[index]
        slot = next((slot for slot in self.slots if slot.holds == index), None)
        if slot is None:
            slot = self._slot_for(index)
            self._send(slot, index)
        if slot is not self.current:
            self._receive(slot, index)
        coming = (index + 1) % len(self)
        if all(slot.holds != coming for slot in self.slots):
            self._send(self._slot_for(coming), coming)
        return self.modules[index]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the slots and of the experts."""
        experts = [] if self.experts is None else self.experts.stacks
        return iter([*(slot.memory for slot in self.slots), *experts])

    @property
    def brought(self) -> int:
        """As of `Layers`."""
        return self._brought + (0 if self.experts is None else self.experts.brought)

    def _slot_for(self, index: int) -> Slot:
        if len(self.slots) == len(self):
            return self.slots[index]
        return next((slot for slot in self.slots if slot is not self.current), self.slots[0])

    def _send(self, slot: Slot, index: int) -> None:
        held, slot.holds = slot.holds, None  # nothing, if this is interrupted
        if held is not None:
            self.layouts[held].release()
        slot.arrives = self.courier.submit(self._carry, index, slot.memory, self._now())
        slot.holds = index

    def _receive(self, slot: Slot, index: int) -> None:
        if slot.arrives is None:  # they stayed
            self.current = slot
            return
        try:
            arrived = slot.arrives.result()
        except BaseException:
            slot.holds = None
            raise
        if self.stream is not None and arrived is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(arrived)
        self.layouts[index].bind(slot.memory)
        self.current, slot.arrives = slot, None
        self._brought += self.layouts[index].nbytes

    def _now(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.stream.device).record_event()
        return event

    @torch.inference_mode()
    def _carry(
        self, index: int, memory: Tensor, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        # The courier's thread has to allow what inference mode does: memory may be made in it.
        with torch.cuda.stream(self.stream):
            if self.stream is not None and free is not None:
                self.stream.wait_event(free)
            self.source.bring(index, memory)
            return None if self.stream is None else self.stream.record_event()

    def _measured(self) -> float:
        # Files that fit in free memory will be read from there: second reads count.
        again = self.nbytes < psutil.virtual_memory().available
        rates = []
        for index in sorted({len(self) * step // SAMPLES for step in range(SAMPLES)}):
            for _ in range(1 + again):
                start = perf_counter()
                arrived = self._carry(index, self._slot_for(index).memory, self._now())
                if arrived is not None:
                    arrived.synchronize()
                seconds = perf_counter() - start
            rates.append(self.layouts[index].nbytes / seconds)
        return median(rates)


def stream_from_memory(model: LoadedModel) -> bool:
    """Stream a loaded model's layers from host memory from now on.

    Returns:
        Whether this was possible. It is not on a CPU, with layers that are streamed already or on
        several devices, for other types of weights, or without enough host memory.

    Raises:
        torch.OutOfMemoryError, ModelError: as `off_device`.
    """
    name, stored = model.weights.name, model.weights.stored
    moves = name == MXFP4 or (name in (*PLAIN, "nf4") and not stored)
    stays = model.device.type == "cpu" or model.cards or model.layers.passing is not None
    if stays or not moves:
        return False
    modules = model.layers.modules
    needed = sum(tensor.nbytes for layer in modules for tensor in layer.parameters())
    # A layer is there twice while it is copied; the rest of a fifth is left to other programs.
    if psutil.virtual_memory().available < 1.2 * needed:
        return False
    model.layers = off_device(model)
    return True


def off_device(model: LoadedModel) -> StreamedLayers:
    """Move a model's layers from the device to host memory, from which they are streamed.

    The layers leave the device when all are copied and the slots are allocated: beside them or, if
    there is no room, in their place.

    Raises:
        torch.OutOfMemoryError: there is no room, not even in their place; nothing has changed.
        ModelError: likewise, but another program took their memory in the meantime.
    """
    modules, device = model.layers.modules, model.device
    model.layers.for_steps = None  # holds weights too
    layouts = [lay_out(layer, device) for layer in modules]
    source = InMemory([copied(layout) for layout in layouts])
    made = partial(StreamedLayers, modules, layouts, source, device, "ram")
    streamed = unless_short(device, made)
    if streamed is not None:
        _leave(layouts, device)
        return streamed
    try:  # here the error no longer holds what was allocated
        _leave(layouts, device)
        return made()
    except BaseException as error:
        failed = error.with_traceback(None)  # likewise
    _return(layouts, source, device)
    raise failed


def _leave(layouts: Sequence[Layout], device: torch.device) -> None:
    for layout in layouts:
        layout.release()
    release_memory(device)


def _return(layouts: Sequence[Layout], source: InMemory, device: torch.device) -> None:
    release_memory(device)
    try:
        for index, layout in enumerate(layouts):
            memory = torch.empty(layout.size, dtype=torch.uint8, device=device)
            source.bring(index, memory)
            layout.bind(memory)
    except Exception as error:
        if not is_oom(error):
            raise
        raise ModelError(
            f"the model's weights no longer fit on {device}, where another program took their "
            "memory while they were moved: load the model again"
        ) from error
