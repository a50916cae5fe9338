"""Undoing and redoing rotary positions with the cos and sin that the model itself computes.

Most admitted architectures turn a head's first half against its second; some turn only the first
part of a head (Phi-3), some also stretch what they turn (YaRN, longrope). Both show in cos and sin,
so a rotation can be undone without knowing its kind. Those whose rotations cannot be undone here
are named in `architectures`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlite.errors import SettingError
from kvlite.model.architectures import architecture
from kvlite.model.load import LoadedModel

Rotation = tuple[Tensor, Tensor]
"""cos and sin of n positions, each `(1, n, turned)`, with `turned` <= dim; n may be 1 for all."""


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Vectors `(batch, heads, n, dim)` rotated as the model does it, in float32."""
    cos, sin = (each[:, None].float() for each in rotation)
    return _turn(x.float(), cos, sin)


def unrotated(x: Tensor, rotation: Rotation) -> Tensor:
    """The inverse of `rotated`."""
    cos, sin = (each[:, None].float() for each in rotation)
    stretch = cos.square() + sin.square()
    return _turn(x.float(), cos / stretch, -sin / stretch)


def turned(x: Tensor, at: Rotation, to: Rotation) -> Tensor:
    """Queries or keys moved from positions `at` to positions `to`, in their dtype."""
    return rotated(unrotated(x, at), to).to(x.dtype)


def rotations_after(model: LoadedModel, end: int, count: int) -> list[Rotation]:
    """Rotations of the `count` positions from `end` on, for every layer, with the frequencies of
    the positions before, even if the model would change them with the length.

    They are composed: a rotation by a sum of two angles is one by each, in turn.
    """
    steps = max(1, min(count, end - 1))
    known = torch.cat([torch.arange(1, steps + 1), torch.tensor([end - 1])]).to(model.device)
    tables = model.rotations_at(known, torch.float32)
    distinct = {id(cos): (cos, sin) for cos, sin in tables}
    made = {key: _continued(*each, count, model.dtype) for key, each in distinct.items()}
    return [made[id(cos)] for cos, _ in tables]


def rotations_apart(model: LoadedModel, positions: Sequence[int]) -> list[Rotation]:
    """Rotations of positions, for every layer, each as if it were the last: some models'
    frequencies change with the length."""
    if fixed_tables(model):
        return model.rotations_at(torch.tensor(positions, device=model.device), model.dtype)
    apart = [model.rotations(position, 1) for position in positions]
    by_layer = [*zip(*apart, strict=True)]
    by_table = {id(each[0][0]): each for each in by_layer}
    joined = {
        table: (torch.cat([cos for cos, _ in each], 1), torch.cat([sin for _, sin in each], 1))
        for table, each in by_table.items()
    }
    return [joined[id(each[0][0])] for each in by_layer]


def _continued(cos: Tensor, sin: Tensor, count: int, dtype: torch.dtype) -> Rotation:
    (cos, cos_at), (sin, sin_at) = ((each[:, :-1], each[:, -1:]) for each in (cos, sin))
    stretch = (cos_at.square() + sin_at.square()).sqrt()
    parts: list[Rotation] = []
    for _ in range(0, count, cos.shape[1]):
        after = (cos_at * cos - sin_at * sin) / stretch, (sin_at * cos + cos_at * sin) / stretch
        cos_at, sin_at = (each[:, -1:] for each in after)
        parts.append(after)
    coses, sines = zip(*parts, strict=True)
    return torch.cat(coses, 1)[:, :count].to(dtype), torch.cat(sines, 1)[:, :count].to(dtype)


def unturnable(model: LoadedModel) -> str:
    """Why keys cannot be turned to other positions; empty if they can."""
    if _rope_type(model) == "longrope":
        return "this model's rotations (longrope) change with the length of the context"
    return architecture(model.shape.model_type).unturnable


def fixed_tables(model: LoadedModel) -> bool:
    """Whether frequencies never change, so that nothing has to look at the positions to rotate."""
    kinds = _rope_type(model)
    named = kinds.values() if isinstance(kinds, dict) else [kinds]
    return not any("dynamic" in str(kind) or kind == "longrope" for kind in named)


def require_turnable(model: LoadedModel, option: str) -> None:
    """Raises SettingError if rotations cannot be undone, which `option` needs."""
    if why := unturnable(model):
        raise SettingError(
            f"{option} turns keys to other positions, but {why}: set "
            f"{option.partition('=')[0]}=false"
        )


def _rope_type(model: LoadedModel) -> Any:
    return getattr(getattr(model.module.model, "rotary_emb", None), "rope_type", None)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    moving, still = x[..., :width], x[..., width:]
    first, second = moving.chunk(2, -1)
    moving = moving * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([moving, still], -1)
