"""Experts whose weights stay in the blocks of a GGUF file (`ops.blocks`)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvlite.model.experts import PackedExperts
from kvlite.model.packed_linear import PackedMatrix, for_cpu, is_for_cpu, joint_product
from kvlite.ops.blocks import BlockFormat


class BlockExperts(PackedExperts):
    """One projection of all experts of a layer, in one or two pieces along its outputs: those of
    gates, then those they are multiplied with, each in a format of its own.

    Attributes:
        pieces: uint8; of each piece `(experts, outputs, bytes of one)` as in a file or, `on_cpu`,
            as of `packed_linear.for_cpu`, `(experts, bytes of one, outputs)`.
        forms: their formats.
        dtype: what a matrix is unpacked to, and the type of products.
        on_cpu: whether products are formed there.
        transposed: whether transformers has matrices `(inputs, outputs)`.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[Tensor, BlockFormat]],
        dtype: torch.dtype,
        *,
        transposed: bool = False,
        on_cpu: bool | None = None,
    ) -> None:
        """Take blocks as a file has them, `(experts, outputs, bytes of one)`; unless told, products
        are formed where these are."""
        super().__init__()
        self.dtype, self.transposed = dtype, transposed
        self.on_cpu = is_for_cpu(pieces[0][0], dtype) if on_cpu is None else on_cpu
        self.forms = [form for _, form in pieces]
        held = (for_cpu(*each) if self.on_cpu else each[0] for each in pieces)
        self.pieces = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in held)
        self.stacks = tuple(f"pieces.{number}" for number in range(len(pieces)))

    def __getitem__(self, expert: int) -> Tensor:
        """One expert's matrix, `(outputs, inputs)` unless it is `transposed`."""
        made = [each.unpacked() for each in self._matrices(expert)]
        whole = made[0] if len(made) == 1 else torch.cat(made)
        return whole.t() if self.transposed else whole

    def product(self, rows: Tensor, expert: int, transposed: bool) -> Tensor:
        """As of `PackedExperts`: few rows by its blocks, more by what they are unpacked to."""
        assert transposed == self.transposed
        return joint_product(rows, self._matrices(expert))

    def in_place(self, transposed: bool) -> bool:
        return transposed == self.transposed

    def products(self, rows: Tensor, chosen: Tensor, bias: Tensor | None) -> Tensor:
        from kvlite.ops.triton_linear import multiply

        outputs = [piece.shape[1] for piece in self.pieces]
        out = rows.new_empty(len(chosen), sum(outputs))
        for piece, form, part in zip(self.pieces, self.forms, out.split(outputs, 1), strict=True):
            multiply(rows, piece, form, chosen, part)
        return out if bias is None else out + bias[chosen]

    def _matrices(self, expert: int) -> list[PackedMatrix]:
        return [
            PackedMatrix(piece[expert], form, self.dtype, self.on_cpu)
            for piece, form in zip(self.pieces, self.forms, strict=True)
        ]
