"""Steps through several layers on a CPU in one compiled call, where no layer needs more of Python
than to say where things lie: a small model's token takes half as long."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvlite.engine import compiled_rows
from kvlite.model.load import LoadedModel
from kvlite.model.packed_token_layer import PackedTokenLayer

if TYPE_CHECKING:
    from kvlite.engine.decode import LayerStep, Step


def through_layers(model: LoadedModel, steps: Sequence["Step"]) -> bool:
    """Bring steps at the same layer through that and all after it that one call can do; whether
    there was any. All is counted at once as it ends: before, it can be done again."""
    start, rotations = steps[0].index, [step.rotations[steps[0].index] for step in steps]
    layers: list[PackedTokenLayer] = []
    rows: list[list[LayerStep]] = []
    if model.layers.passing is None and not any(map(_is_busy, steps)):
        for index in range(start, len(model.layers)):
            layer = model.step_layer(index)
            if not isinstance(layer, PackedTokenLayer):
                break
            row = [step.through_layer(index) for step in steps]
            if not _are_plain(row):
                break
            turns = steps[0].rotations[index][0] is rotations[0][0]
            if not turns or (layers and layer.softmax != layers[0].softmax):
                break
            layers.append(layer)
            rows.append(row)
    if not layers:
        return False
    from kvlite.ops.numba_step import through

    cos, sin = (torch.cat(tables).numpy() for tables in zip(*rotations, strict=True))
    lines = [[compiled_rows.line(each) for each in row] for row in rows]
    out, came = through(
        [layer.weights for layer in layers],
        torch.cat([step.hidden for step in steps]).numpy()[:, 0],
        cos,
        sin,
        layers[0].softmax.scale,
        lines,
        compiled_rows.RECALLING,
    )
    ends = zip(steps, torch.from_numpy(out)[:, None].split(1), strict=True)
    changes = [
        change
        for step, hidden in ends
        for change in ((step, "hidden", hidden), (step, "index", start + len(layers)))
    ]
    compiled_rows.commit(rows, lines, came.tolist(), *changes)
    return True


def _is_busy(step: "Step") -> bool:
    """Whether a step is within a layer, is several sequences', or keeps its queries."""
    return step.step is not None or len(step.hidden) > 1 or bool(step.cache.queries)


def _are_plain(row: Sequence["LayerStep"]) -> bool:
    """Whether steps through a layer do no more than is compiled, and leave it as it is then."""
    return all(
        compiled_rows.is_plain(step)
        and step.policy.method.decoding.trim is None
        and (len(row) > 1 or compiled_rows.is_small(step))
        for step in row
    )
