"""Attention under a lambda mask: only to the first tokens and the most recent ones.

Source: "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models", section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache
from kvlite.errors import SettingError
from kvlite.methods.capabilities import LambdaMask
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation, require_turnable, turned
from kvlite.ops.attention import attend, attend_band, attend_causal, merged
from kvlite.ops.softmax import Softmax


@dataclass(frozen=True)
class PositionClamp:
    """Clamps queries and sinks to the same distance, wherever they are.

    Attributes:
        sinks, start, far: rotations of the sinks' positions, of the first position, and of the
            one that lies as far from it as the limit.
    """

    sinks: Rotation
    start: Rotation
    far: Rotation

    def keys(self, keys: Tensor) -> Tensor:
        """The sinks', all at the first position."""
        return turned(keys, self.sinks, self.start)

    def queries(self, q: Tensor, own: Rotation) -> Tensor:
        """Rotated at `own` positions, now all at the limit."""
        return turned(q, own, self.far)


@dataclass(frozen=True)
class SparseAttentionMask:
    """How one layer's tokens see what it holds; its first slots hold the first tokens."""

    mask: LambdaMask
    limit: PositionClamp | None

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        first: int,
        own: Rotation,
        softmax: Softmax,
    ) -> Tensor:
        """Attention of the last L of N entries, as far as each of them sees.

        Args:
            first: position of the first of the L; the others follow it.
            own: rotation of all of them.

        Returns:
            `(batch, heads, L, dim)`.
        """
        near = min(max(0, self.mask.sinks + self.mask.window - first), q.shape[2])
        end = keys.shape[2] - q.shape[2] + near
        parts = []
        if near:
            rows, held, their = q[:, :, :near], keys[:, :, :end], values[:, :, :end]
            parts.append(attend_causal(rows, held, their, softmax))
        if near < q.shape[2]:
            own = own[0][:, near:], own[1][:, near:]
            parts.append(self._limited(q[:, :, near:], keys, values, own, softmax))
        return torch.cat([softmax.with_sinks(*part)[0] for part in parts], 2)

    def _limited(
        self, q: Tensor, keys: Tensor, values: Tensor, own: Rotation, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """As `attend`, for tokens that do not see everything."""
        sinks, window = self.mask.sinks, self.mask.window
        recent = attend_band(q, keys[:, :, sinks:], values[:, :, sinks:], window, softmax)
        if not sinks:
            return recent
        keys, values = keys[:, :, :sinks], values[:, :, :sinks]
        if self.limit is not None:
            q, keys = self.limit.queries(q, own), self.limit.keys(keys)
        return merged(attend(q, keys, values, softmax, causal=False), recent)


def sparse_masks(
    model: LoadedModel, policies: Sequence[LayerPolicy]
) -> list[SparseAttentionMask | None]:
    """How each layer sees, None where it sees all that it holds."""
    masks = [policy.mask for policy in policies]
    limits = {mask: _limits(model, mask) for mask in {*masks} if mask is not None and mask.limit}
    return [
        None
        if mask is None
        else SparseAttentionMask(mask, limits[mask][layer] if mask.limit else None)
        for layer, mask in enumerate(masks)
    ]


def _limits(model: LoadedModel, mask: LambdaMask) -> list[PositionClamp]:
    sinks, far = model.rotations(0, mask.sinks), model.rotations(mask.window, 1)
    return [
        PositionClamp(near, (near[0][:, :1], near[1][:, :1]), there)
        for near, there in zip(sinks, far, strict=True)
    ]


def require_served(
    model: LoadedModel, policies: Sequence[LayerPolicy], layers: Sequence[LayerCache], seen: int
) -> None:
    """Raises SettingError if a mask's sinks cannot be held at their distance in this model, or
    were dropped by an earlier turn."""
    for policy, layer in zip(policies, layers, strict=True):
        if policy.mask is None:
            continue
        if policy.mask.limit:
            require_turnable(model, f"{policy.method.name}:limit=true")
        if not all(
            _holds_first(head_group, policy.mask.sinks, seen) for head_group in layer.head_groups
        ):
            raise SettingError(
                f"method {policy.method.name} attends to the first {policy.mask.sinks} tokens, "
                "which an earlier turn has dropped: start a new conversation, or use streaming"
            )


def _holds_first(head_group: KVHeadGroup, sinks: int, seen: int) -> bool:
    if head_group.used == seen or head_group.residual_positions.is_meta:
        return True
    first = torch.arange(sinks, device=head_group.positions.device)
    line = head_group.positions[:, :, : head_group.used].sort(-1).values[..., :sinks]
    return head_group.used > sinks and bool((line == first).all())


def make_room(layer: LayerCache, mask: LambdaMask, count: int) -> None:
    """Drop, in place, what no token to come will see, if less than `count` slots are left."""
    for head_group in layer.head_groups:
        if head_group.room < count:
            head_group.keep_ends(mask.sinks, mask.window)
