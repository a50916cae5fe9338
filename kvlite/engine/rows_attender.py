"""Rows of several conversations in one layer: each attends by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlite.cache.recurrent import StateCarrier, joined, parted
from kvlite.engine import compiled_rows
from kvlite.engine.layer_program import LayerProgram
from kvlite.engine.layer_step import LayerStep
from kvlite.model.attention_interface import Lender
from kvlite.ops.softmax import Softmax

Row = LayerStep | LayerProgram
"""One conversation's part."""


class RowsAttender:
    """Attends with row i of a batch to the layer of conversation i.

    Attributes:
        carrier: the states of recurrent layers, those of conversation i in row i.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.carrier = StateCarrier(joined([row.carrier.before for row in rows]))

    def through(self, module: Any, hidden: Tensor, **given: Any) -> Tensor:
        """What a layer makes of hidden states `(rows, 1, hidden size)`; each conversation has its
        own states after the token."""
        out: Tensor = module(hidden, kvlite=self, **given)
        parts = parted(self.carrier.after, len(self.rows))
        for row, states in zip(self.rows, parts, strict=True):
            row.carrier.after = states
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """As `model.attention_interface.Attender`."""
        parts = zip(self.rows, q.split(1), k.split(1), v.split(1), strict=True)
        return torch.cat([row.attend(one, key, value, softmax) for row, one, key, value in parts])

    def lender(self, index: int) -> Lender:
        """As of a row, for all."""
        lenders = [row.lender(index) for row in self.rows]
        coses, sines = zip(*(lender.rotation for lender in lenders), strict=True)

        def over(q: Tensor, softmax: Softmax) -> Tensor:
            rows = zip(lenders, q.split(1), strict=True)
            return torch.cat([lender.over(q, softmax) for lender, q in rows])

        return Lender((torch.cat(coses), torch.cat(sines)), over)


class StepsAttender(RowsAttender):
    """Attends with those rows at once for which a call is compiled."""

    def __init__(self, steps: Sequence[LayerStep]) -> None:
        super().__init__(steps)
        self.steps = steps

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """As `model.attention_interface.Attender`."""
        plain, out = compiled_rows.plain(self.steps, q, k, v), torch.empty_like(q)
        if plain:
            given = q[plain], k[plain], v[plain]
            out[plain] = compiled_rows.attend([self.steps[row] for row in plain], *given, softmax)
        for row, step in enumerate(self.steps):
            if row not in plain:
                own = slice(row, row + 1)
                out[own] = step.attend(q[own], k[own], v[own], softmax)
        return out
