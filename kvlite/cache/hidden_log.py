"""The last layer's output for the last tokens, which a model's MTP head needs."""

import torch
from torch import Tensor

# Tokens of which hidden states are kept.
ROWS = 512


class HiddenLog:
    """A ring of hidden states before the final norm, that of position p in row p % ROWS.

    Attributes:
        start, end: it has those of positions from `start` on, up to `end`.
        rows: `(1, ROWS, hidden size)`; empty before anything was written.
    """

    def __init__(self, device: torch.device) -> None:
        """Keep them on a device, wherever they come from: the host, where memory is short."""
        self.start = self.end = 0
        self.rows = torch.empty(0, device=device)

    def write(self, first: int, hidden: Tensor) -> None:
        """Keep the last hidden states `(1, L, hidden size)` of positions from `first` on. Those of
        later positions are forgotten; all are, if some between were never written."""
        if not self.rows.numel():
            size = 1, ROWS, hidden.shape[2]
            self.rows = torch.empty(size, dtype=hidden.dtype, device=self.rows.device)
        end = first + hidden.shape[1]
        first, hidden = max(first, end - ROWS), hidden[:, -ROWS:].to(self.rows.device)
        self.start = max(self.start if self.start <= first <= self.end else first, end - ROWS)
        self.end = end
        done = 0
        for rows in _rows(range(first, end)):
            self.rows[:, rows] = hidden[:, done : done + rows.stop - rows.start]
            done += rows.stop - rows.start

    def of(self, positions: range) -> Tensor:
        """Hidden states `(1, n, hidden size)` of positions that it has."""
        return torch.cat([self.rows[:, rows] for rows in _rows(positions)], 1)


def _rows(positions: range) -> list[slice]:
    start, count = positions.start % ROWS, len(positions)
    before_end = min(count, ROWS - start)
    return [slice(start, start + before_end), slice(0, count - before_end)]
