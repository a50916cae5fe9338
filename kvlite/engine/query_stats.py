"""What queries of a layer are like: their mean and covariance, gathered chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvlite.methods.layer_policy import LayerPolicy
from kvlite.methods.scores import Expected
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation, rotated


@dataclass(frozen=True)
class QueryStatistics:
    """Mean and covariance of un-rotated queries, in float64, none of which is held.

    Each chunk is centered by its own mean before it is joined to those before, so that no small
    covariance is the difference of large sums.
    """

    count: int = 0
    mean: Tensor | None = None
    scatter: Tensor | None = None

    def joined(self, q: Tensor) -> "QueryStatistics":
        """With queries `(batch, heads, n, dim)` float32 counted too."""
        count = q.shape[2]
        if not count:
            return self
        mean = q.mean(2, keepdim=True)
        centered = q - mean
        scatter = torch.matmul(centered.transpose(-1, -2), centered).double()
        mean = mean.squeeze(2).double()
        if self.mean is None or self.scatter is None:
            return QueryStatistics(count, mean, scatter)
        both, apart = self.count + count, mean - self.mean
        between = apart[..., :, None] * apart[..., None, :]
        scatter += self.scatter + between * (self.count * count / both)
        return QueryStatistics(both, self.mean + apart * (count / both), scatter)

    def expected(self, rotation: Rotation) -> Expected | None:
        """The same queries under a mean rotation; None if none was counted."""
        if self.mean is None or self.scatter is None:
            return None
        mean = rotated(self.mean[:, :, None], rotation).squeeze(2)
        half = rotated(self.scatter / self.count, rotation).transpose(-1, -2)
        return Expected(mean, rotated(half, rotation))


def rotations_to_come(
    model: LoadedModel, policies: Sequence[LayerPolicy], end: int
) -> list[Rotation | None]:
    """For each layer the mean rotation of the positions that its method wants to know of, from
    `end` on and as far as the model's context goes; None where it wants none."""

    @cache
    def means(future: int) -> list[Rotation]:
        count = max(1, min(future, model.shape.max_context - end))
        return [
            (cos.float().mean(1, keepdim=True), sin.float().mean(1, keepdim=True))
            for cos, sin in model.rotations(end, count)
        ]

    wanted = [policy.method.needs.future_queries for policy in policies]
    return [
        None if each is None else means(each.future)[layer] for layer, each in enumerate(wanted)
    ]
