"""Steps through several layers on a CPU in one compiled call, where no layer needs more of Python
than to say where things lie: a small model's token takes half as long."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlite.engine import compiled_rows
from kvlite.engine.implementations import implementation_for
from kvlite.model.load import LoadedModel
from kvlite.model.token_layer import PackedTokenLayer

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
    plain = all(len(each.token_ids) == 1 for each in conversations)
    compiles = implementation_for(conversations[0].cache.layers[start].keys).takes_rows
    if model.layers.passing is None and compiles and plain:
        for index in range(start, len(model.layers)):
            layer: PackedTokenLayer | None = getattr(model.step_layer(index), "compiled", None)
            if layer is None:
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

    batch, tokens, width = hidden.shape
    cos, sin = (
        torch.cat([table.transpose(0, 1) for table in tables]).numpy()
        for tables in zip(*rotations, strict=True)
    )
    lines = [
        [compiled_rows.line(each, token) for each in row for token in range(tokens)] for row in rows
    ]
    recalls = tokens > 1 and any(compiled_rows.source_of(row[0]) is not None for row in rows)
    slots = max(row[0].layer.head_groups[0].used for row in rows) + tokens if recalls else 0
    if recalls:
        for (step,) in rows:
            step.remember_held()
    out, num_fetched, held = through(
        [layer.weights for layer in layers],
        hidden.numpy().reshape(-1, width),
        cos,
        sin,
        layers[0].softmax.scale,
        lines,
        compiled_rows.RECALLING,
        tokens,
        slots,
    )
    if recalls:
        for (step,), own in zip(rows, torch.from_numpy(held), strict=True):
            used = range(step.layer.head_groups[0].used + 1, slots + 1)
            step.held += [[each[None, :, :count]] for each, count in zip(own, used, strict=False)]
    compiled_rows.count(rows, lines, num_fetched.tolist())
    return start + len(layers), torch.from_numpy(out).view(batch, tokens, width)


def _are_plain(row: Sequence["LayerStep"]) -> bool:
    """Whether steps through a layer do no more than is compiled, and leave it as it is then."""
    several = len(row) > 1 or len(row[0].positions) > 1
    return all(
        compiled_rows.is_plain(step)
        and step.queries is None
        and step.policy.method.decoding.trim is None
        and (several or compiled_rows.is_small(step))
        for step in row
    )
