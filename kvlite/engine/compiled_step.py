"""Steps through several layers on a CPU in one compiled call, where no layer needs more of Python
than to say where things lie: a small model's token takes half as long."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlite.engine import compiled_rows
from kvlite.model.load import LoadedModel
from kvlite.model.packed_token_layer import PackedTokenLayer

if TYPE_CHECKING:
    from kvlite.engine.layer_step import LayerStep
    from kvlite.engine.step import StepRows


def through_layers(
    model: LoadedModel, conversations: Sequence["StepRows"], start: int, hidden: Tensor
) -> tuple[int, Tensor]:
    """Bring rows through layer `start` and all after it that one call can do; the layer behind
    those, and what goes into it."""
    rotations = [each.rotations[start] for each in conversations]
    layers: list[PackedTokenLayer] = []
    rows: list[list[LayerStep]] = []
    if model.layers.passing is None and hidden.shape[1] == 1 and _are_apart(conversations):
        for index in range(start, len(model.layers)):
            layer = model.step_layer(index)
            if not isinstance(layer, PackedTokenLayer):
                break
            row = [each.layer(index) for each in conversations]
            if not _are_plain(row):
                break
            turns = conversations[0].rotations[index][0] is rotations[0][0]
            if not turns or (layers and layer.softmax != layers[0].softmax):
                break
            layers.append(layer)
            rows.append(row)
    if not layers:
        return start, hidden
    from kvlite.ops.numba_step import through

    cos, sin = (torch.cat(tables).numpy() for tables in zip(*rotations, strict=True))
    lines = [[compiled_rows.line(each) for each in row] for row in rows]
    out, came = through(
        [layer.weights for layer in layers],
        hidden.numpy()[:, 0],
        cos,
        sin,
        layers[0].softmax.scale,
        lines,
        compiled_rows.RECALLING,
    )
    compiled_rows.count(rows, lines, came.tolist())
    return start + len(layers), torch.from_numpy(out)[:, None]


def _are_apart(conversations: Sequence["StepRows"]) -> bool:
    """Whether rows are of one sequence each, which keep no queries."""
    return all(len(each.token_ids) == 1 and not each.cache.queries for each in conversations)


def _are_plain(row: Sequence["LayerStep"]) -> bool:
    """Whether steps through a layer do no more than is compiled, and leave it as it is then."""
    return all(
        compiled_rows.is_plain(step)
        and step.policy.method.decoding.trim is None
        and (len(row) > 1 or compiled_rows.is_small(step))
        for step in row
    )
