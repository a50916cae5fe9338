"""Decoder layers of a model that is loaded leave the device, and come in turn from then on; or all
is as it was."""

from collections.abc import Callable, Sequence
from functools import partial

import psutil
import torch

from kvlite.errors import ModelError
from kvlite.memory.free import is_oom, release_memory
from kvlite.model.load import LoadedModel
from kvlite.model.weights import PLAIN
from kvlite.offload.weights.layers import StreamedLayers
from kvlite.offload.weights.slots import Layout, lay_out
from kvlite.offload.weights.sources import InMemory, copied


def stream_from_memory(model: LoadedModel) -> bool:
    """Let the layers of a model that is loaded wait in host memory from now on.

    Returns:
        Whether they do: not where the device is that memory, they came in turn before, their
        weights are of a kind that does not, or the host has no room for them.

    Raises:
        torch.OutOfMemoryError, ModelError: as `off_device`.
    """
    plain = model.weights.name in (*PLAIN, "nf4") and not model.weights.stored
    if model.device.type == "cpu" or model.layers.passing is not None or not plain:
        return False
    modules = model.layers.modules
    needed = sum(tensor.nbytes for layer in modules for tensor in layer.parameters())
    # A layer is there twice while it is laid out; more is left to others.
    if psutil.virtual_memory().available < 1.2 * needed:
        return False
    model.layers = off_device(model)
    return True


def off_device(model: LoadedModel) -> StreamedLayers:
    """The layers of a model that has them on the device, which they leave: copied to host memory,
    from where they come in turn.

    They leave when all are copied and the slots are there: made beside them or, where that is too
    much, in their place.

    Raises:
        torch.OutOfMemoryError: there is no room, not even in their place; all is as it was.
        ModelError: likewise, and another program took their place meanwhile.
    """
    modules, device = model.layers.modules, model.device
    layouts = [lay_out(layer, device) for layer in modules]
    source = InMemory([copied(layout) for layout in layouts])
    made = partial(StreamedLayers, modules, layouts, source, device, "ram")
    streamed = _beside(made)
    if streamed is None:
        streamed = _instead(made, layouts, source, device)
    _leave(layouts, device)
    return streamed


def _beside(made: Callable[[], StreamedLayers]) -> StreamedLayers | None:
    """Layers that come, with slots beside those that are there; None if there is no room."""
    try:
        return made()
    except Exception as error:
        if not is_oom(error):
            raise
    return None


def _instead(
    made: Callable[[], StreamedLayers],
    layouts: Sequence[Layout],
    source: InMemory,
    device: torch.device,
) -> StreamedLayers:
    """Layers that come, with slots in the place of those that are there; these return if that
    fails."""
    try:
        _leave(layouts, device)
        return made()
    except BaseException as error:
        failed = error.with_traceback(None)  # which holds what was made
    _return(layouts, source, device)
    raise failed


def _leave(layouts: Sequence[Layout], device: torch.device) -> None:
    for layout in layouts:
        layout.release()
    release_memory(device)


def _return(layouts: Sequence[Layout], source: InMemory, device: torch.device) -> None:
    """Put layers where they were, from their copies.

    Raises:
        ModelError: there is no more room.
    """
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
