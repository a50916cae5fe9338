"""Layers that leave the device when memory runs out, and are then streamed from host memory."""

from collections.abc import Callable, Sequence
from functools import partial

import psutil
import torch

from kvlite.errors import ModelError
from kvlite.memory.free import is_oom, release_memory
from kvlite.model.load import LoadedModel
from kvlite.model.weights import MXFP4, PLAIN
from kvlite.offload.weights.buffers import InMemory, Layout, copied, lay_out
from kvlite.offload.weights.layers import StreamedLayers


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
    streamed: StreamedLayers | None = None
    try:
        streamed = made()
    except Exception as error:
        if not is_oom(error):
            raise
    if streamed is None:  # here the error no longer holds what was allocated
        streamed = _instead(made, layouts, source, device)
    _leave(layouts, device)
    return streamed


def _instead(
    made: Callable[[], StreamedLayers],
    layouts: Sequence[Layout],
    source: InMemory,
    device: torch.device,
) -> StreamedLayers:
    try:
        _leave(layouts, device)
        return made()
    except BaseException as error:
        failed = error.with_traceback(None)  # the traceback holds what was allocated
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
