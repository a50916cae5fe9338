"""What queries of a layer are like: their mean and covariance, gathered chunk by chunk."""

import torch
from torch import Tensor

from kvlite.methods.scores import Expected
from kvlite.model.rotary import Rotation, rotated


class QueryStatistics:
    """Mean and covariance of un-rotated queries, in float64, none of which is held.

    Each chunk is centred by its own mean before it is joined to those before, so that no small
    covariance is the difference of large sums.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.scatter: Tensor | None = None

    def add(self, q: Tensor) -> None:
        """Count queries `(batch, heads, n, dim)` float32."""
        count = q.shape[2]
        if not count:
            return
        mean = q.mean(2, keepdim=True)
        centred = q - mean
        scatter = torch.matmul(centred.transpose(-1, -2), centred).double()
        mean = mean.squeeze(2).double()
        if self.mean is None or self.scatter is None:
            self.count, self.mean, self.scatter = count, mean, scatter
            return
        both, apart = self.count + count, mean - self.mean
        between = apart[..., :, None] * apart[..., None, :]
        self.scatter += scatter + between * (self.count * count / both)
        self.mean += apart * (count / both)
        self.count = both

    def expected(self, rotation: Rotation) -> Expected | None:
        """The same queries under a mean rotation; None if none was counted."""
        if self.mean is None or self.scatter is None:
            return None
        mean = rotated(self.mean[:, :, None], rotation).squeeze(2)
        half = rotated(self.scatter / self.count, rotation).transpose(-1, -2)
        return Expected(mean, rotated(half, rotation))
