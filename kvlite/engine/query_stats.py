"""What queries of a layer are like: their mean and covariance, gathered chunk by chunk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.methods.scores import Expected
from kvlite.model.rotary import Rotation, rotated


@dataclass(frozen=True)
class QueryStatistics:
    """Mean and covariance of un-rotated queries, in float64, none of which is held.

    Each chunk is centred by its own mean before it is joined to those before, so that no small
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
        centred = q - mean
        scatter = torch.matmul(centred.transpose(-1, -2), centred).double()
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
