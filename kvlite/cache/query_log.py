"""The queries of a layer's last tokens. From these and the keys, attention can be recomputed to
find the passages that an answer came from."""

import torch
from torch import Tensor

from kvlite.ops.softmax import Softmax

# Tokens of which queries are kept.
ROWS = 512


class QueryLog:
    """A ring buffer of one layer's queries, on its device. Writing never waits, so it can be part
    of a CUDA graph.

    Attributes:
        queries: `(heads, ROWS, dim)`, rotated, that of position p in row p % ROWS.
        positions: `(ROWS,)` int64, whose they are; -1 of rows that were not written.
        softmax: of the layer.
    """

    def __init__(self) -> None:
        self.queries = self.positions = torch.empty(0)
        self.softmax = Softmax(1.0)

    def write(self, positions: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Keep queries `(1, heads, L, dim)` of tokens at `positions` (L,), ascending. Those of a
        token that comes again take the place of the former ones."""
        q, positions = q[0, :, -ROWS:], positions[-ROWS:].long()
        if not self.queries.numel():
            self.queries = q.new_zeros(q.shape[0], ROWS, q.shape[2])
            self.positions = positions.new_full((ROWS,), -1)
        rows = positions % ROWS
        self.queries.index_copy_(1, rows, q)
        self.positions.index_copy_(0, rows, positions)
        self.softmax = softmax

    def of(self, positions: range) -> tuple[Tensor, Tensor]:
        """Which of the tokens at `positions` it has, and their queries `(1, heads, n, dim)`."""
        mine = (self.positions >= positions.start) & (self.positions < positions.stop)
        rows = mine.nonzero().flatten()
        return self.positions[rows], self.queries[None, :, rows]
