"""Statistics of a layer's queries (mean, covariance and lengths), gathered chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvlite.methods.layer_policy import LayerPolicy
from kvlite.methods.scores import Expected
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation, pair_lengths, rotated, rotations_apart, unrotated


@dataclass(frozen=True)
class QueryStatistics:
    """Mean of un-rotated queries, their covariance if it is wanted, and the mean lengths of the
    pairs of channels that were turned, in float64; no query is held.

    Each chunk is centered by its own mean before it is joined to those before, so that no small
    covariance is the difference of large sums.
    """

    count: int = 0
    mean: Tensor | None = None
    scatter: Tensor | None = None
    lengths: Tensor | None = None

    def joined(self, q: Tensor, rotation: Rotation, *, covariance: bool) -> "QueryStatistics":
        """With queries `(batch, heads, n, dim)`, rotated, counted too; `covariance` as each time
        before."""
        count = q.shape[2]
        if not count:
            return self
        lengths = pair_lengths(q, rotation[0].shape[-1] // 2).mean(2).double()
        q = unrotated(q, rotation)
        mean = q.mean(2, keepdim=True)
        scatter = None
        if covariance:
            centered = q - mean
            scatter = torch.matmul(centered.transpose(-1, -2), centered).double()
        mean = mean.squeeze(2).double()
        if self.mean is None or self.lengths is None:
            return QueryStatistics(count, mean, scatter, lengths)
        both, apart = self.count + count, mean - self.mean
        if scatter is not None and self.scatter is not None:
            between = apart[..., :, None] * apart[..., None, :]
            scatter += self.scatter + between * (self.count * count / both)
        share = count / both
        lengths = self.lengths + (lengths - self.lengths) * share
        return QueryStatistics(both, self.mean + apart * share, scatter, lengths)

    def expected(self, rotation: Rotation, at: Rotation) -> Expected | None:
        """The same queries under a mean rotation; None if none was counted.

        Args:
            at: the rotation of any one position, which may stretch.
        """
        if self.mean is None or self.lengths is None:
            return None
        mean, covariance = self.mean[:, :, None], None
        if self.scatter is not None:
            half = rotated(self.scatter / self.count, rotation).transpose(-1, -2)
            covariance = rotated(half, rotation)
        turned = rotated(mean, at).squeeze(2)
        spread = self.lengths.float() - pair_lengths(turned, self.lengths.shape[-1])
        return Expected(rotated(mean, rotation).squeeze(2), covariance, spread)


def rotations_to_come(
    model: LoadedModel, policies: Sequence[LayerPolicy], end: int
) -> list[Rotation | None]:
    """For each layer the mean rotation of the positions that its method wants to know of, after
    `end` and as far as the model's context goes; None where it wants none."""

    @cache
    def means(ahead: Sequence[int]) -> list[Rotation]:
        within = [end + each for each in ahead if end + each < model.shape.max_context]
        tables = rotations_apart(model, within or [end + ahead[0]])
        return [
            (cos.float().mean(1, keepdim=True), sin.float().mean(1, keepdim=True))
            for cos, sin in tables
        ]

    wanted = [policy.method.needs.future_queries for policy in policies]
    return [None if each is None else means(each.ahead)[layer] for layer, each in enumerate(wanted)]
