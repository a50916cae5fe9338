"""ExpectedAttention: what future queries are likely to attend to."""

from dataclasses import dataclass
from functools import cached_property

from kvlite.methods.capabilities import FutureQueries, Needs
from kvlite.methods.scored import Scored
from kvlite.methods.scores import Window
from kvlite.methods.types import KVHeadGroup, Tensor


@dataclass(frozen=True)
class ExpectedAttention(Scored):
    """Assumes that future queries have the distribution of those just read, rotated to future
    positions, and keeps the entries that they are expected to attend to.

    The queries are those of this turn, so a later turn judges by its own. The estimate is the same
    as kvpress', except that it ignores soft caps of the logits.

    Attributes:
        future: next positions, over which the rotation of the queries is averaged.
        sinks: first entries that stay; as many of the first queries are not counted.
        use_covariance: use the covariance of the queries, not only their mean.
        use_values: weight an entry by the length of its value.
    """

    name = "expectedattention"
    summary = "keeps what future queries are expected to attend to"
    paper = (
        "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries "
        "Distribution, section 3"
    )

    future: int = 512
    sinks: int = 4
    use_covariance: bool = True
    use_values: bool = True

    at_least = {"future": 1, "sinks": 0}

    @cached_property
    def needs(self) -> Needs:
        future = FutureQueries(range(self.future), self.sinks, self.use_covariance)
        return Needs(attention=True, future_queries=future)

    def score(self, head_group: KVHeadGroup, window: Window) -> Tensor:
        """Expected attention among the entries after the sinks, times the length of the value."""
        import torch
        import torch.nn.functional as F

        from kvlite.ops.attention import grouped

        assert window.expected is not None
        mean = grouped(window.expected.mean[:, :, None], window.kv_heads).squeeze(3)
        covariance = window.expected.covariance
        if covariance is not None:
            covariance = grouped(covariance, window.kv_heads)
        scores = []
        for index, head in enumerate(head_group.heads):
            keys = (
                head_group.keys[:, index, self.sinks : head_group.used].float()
                * window.softmax.scale
            )
            each = [
                self._logits(
                    keys, mean[:, head, i], None if covariance is None else covariance[:, head, i]
                )
                for i in range(mean.shape[2])
            ]
            softmax = window.softmax.of_heads([head], window.kv_heads)
            scores.append(softmax.probabilities(torch.stack(each, 1)).mean(1))
        attention = torch.stack(scores, 1)
        if self.use_values:
            attention *= head_group.values[:, :, self.sinks : head_group.used].float().norm(dim=-1)
        return window.beside(F.pad(attention, (head_group.used - attention.shape[-1], 0)))

    def _logits(self, keys: Tensor, mean: Tensor, covariance: "Tensor | None") -> Tensor:
        """Logarithm of the mean of exp(q k) over Gaussian queries q, `(batch, n)`, for scaled keys
        `(batch, n, dim)` float32."""
        import torch

        logits = torch.matmul(keys, mean[..., None]).squeeze(-1)
        if covariance is not None:
            logits += (torch.matmul(keys, covariance) * keys).sum(-1) / 2
        return logits
