"""Loading a model's own MTP head."""

from functools import partial
from typing import Any

from kvlite.errors import ModelError
from kvlite.model.cpu import split_linears
from kvlite.model.experts import take_few_in_place
from kvlite.model.files import Stored, fit, parts_of, stored_weights
from kvlite.model.gguf.index import gguf_alone
from kvlite.model.load import LoadedModel
from kvlite.model.mtp import empty_mtp, stored_name
from kvlite.offload.weights.buffers import Layout, Place
from kvlite.offload.weights.gguf import open_gguf_mtp
from kvlite.offload.weights.loader import read_and_pack
from kvlite.ops.device import has_triton


def load_mtp(model: LoadedModel) -> bool:
    """Load the head of a model that has one, as its layers were, or as it is in quantized files;
    whether these have it, in numbers that are not quantized. Raises ModelError if other files have
    only some of it, or of another size."""
    head = empty_mtp(model.module, model.dtype)
    if (index := model.weights.index or gguf_alone(model.path)) is not None:
        given: dict[str, Any] = {"device": model.device, "weights": model.weights}
        return open_gguf_mtp(head, index, **given) and _keep(model, head)
    stored = stored_weights(model.path)
    made = {name: parts_of(stored_name(name), stored) for name, _ in head.named_parameters()}
    if not any(made.values()):
        return False
    for name, parameter in head.named_parameters():
        parts = made[name]
        whole = parts and all(each.dtype is not None for each in parts)
        if not whole or not fit(parts, parameter.shape):
            if model.weights.stored:
                return False
            raise ModelError(
                f"the model in {model.path} has no {stored_name(name)} of the size that its config "
                "says: get the model again, or use --speculate off"
            )
    read_and_pack(head, partial(_parts, made), model.device, model.weights)
    # All of it would stay where some of it gets a new layout.
    if model.device.type == "cpu" and model.weights.config is None:
        for parameter in head.parameters():
            parameter.data = parameter.data.clone()
    return _keep(model, head)


def _keep(model: LoadedModel, head: Any) -> bool:
    if model.device.type == "cpu":
        split_linears(head)
    if has_triton(model.device):
        take_few_in_place(head)
    model.mtp = head
    return True


def _parts(made: dict[str, list[Stored]], layout: Layout) -> list[tuple[Place, list[Stored]]]:
    return [(place, made[place.name]) for place in layout.places]
