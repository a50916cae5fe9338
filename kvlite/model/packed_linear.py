"""Layers whose weights stay in the blocks of a GGUF file (`ops.blocks`).

A few tokens multiply the packed weights; many tokens multiply weights that are unpacked for them,
which costs little beside the product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlite.ops.blocks import BlockFormat
from kvlite.ops.device import MANY_ROWS, has_bfloat16

# Up to this many rows, the packed product is faster than unpacking.
FEW_ROWS = 8
# Weights that a CPU unpacks at once, for products that are large enough to be fast.
UNPACKED = 1 << 20


class PackedWeights(nn.Module):
    """A matrix of packed weights.

    Attributes:
        blocks: uint8; `(outputs, bytes of one)` as in a file or, for a CPU, the other way round,
            with codes of Q8_0 from 0 on.
        dtype: what weights are unpacked to, and the type of products.
        in_bfloat16: whether many rows and weights are multiplied in bfloat16.
    """

    def __init__(self, blocks: Tensor, form: BlockFormat, dtype: torch.dtype) -> None:
        """Take blocks as a file has them."""
        super().__init__()
        self.form, self.dtype = form, dtype
        self.out_features = len(blocks)
        self.in_features = blocks.shape[1] // form.nbytes * form.inputs
        # As elsewhere, float32 is planned as on a CPU.
        self.on_cpu = blocks.is_cpu or (blocks.is_meta and dtype == torch.float32)
        self.in_bfloat16 = self.on_cpu and dtype == torch.float32 and has_bfloat16()
        if self.on_cpu:
            blocks = blocks.t().clone(memory_format=torch.contiguous_format)
            if form.name == "Q8_0":
                blocks.view(-1, form.nbytes, self.out_features)[:, 2:] ^= 128
        self.blocks = nn.Parameter(blocks, requires_grad=False)

    def product(self, rows: Tensor) -> Tensor:
        """`rows @ weight.T`, `(n, outputs)`, of `(n, inputs)`."""
        if len(rows) <= FEW_ROWS:
            return self._few(rows)
        if not self.on_cpu:
            return F.linear(rows, self._unpacked_rows(self.blocks))
        if self.in_bfloat16 and len(rows) >= MANY_ROWS <= self.out_features:
            return self._many(rows.to(torch.bfloat16, memory_format=torch.contiguous_format))
        out = rows.new_empty(len(rows), self.out_features)
        step = max(64, UNPACKED // self.in_features)
        for first in range(0, self.out_features, step):
            last = min(first + step, self.out_features)
            torch.mm(rows, self._unpacked(self.blocks, first, last), out=out[:, first:last])
        return out

    def of_outputs(self, ids: Tensor) -> Tensor:
        """The weights of some outputs `(n,)`, `(n, inputs)`."""
        if not self.on_cpu:
            return self._unpacked_rows(self.blocks[ids])
        return self._unpacked(self.blocks[:, ids], 0, len(ids)).t().contiguous()

    def _few(self, rows: Tensor) -> Tensor:
        if rows.is_meta:
            return rows.new_empty(len(rows), self.out_features)
        if self.on_cpu:
            from kvlite.ops.numba_linear import joined, product, products_of

            given = joined(product(self.blocks, self.form))
            return torch.from_numpy(products_of(given, rows.contiguous().numpy()))
        from kvlite.ops.triton_linear import multiply

        return multiply(rows, self.blocks, self.form)

    def _many(self, rows: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), self.out_features, dtype=self.dtype)
        if not rows.is_meta:
            from kvlite.ops.numba_gemm import multiply

            multiply(rows, self.blocks, self.form, out)
        return out

    def _unpacked(self, blocks: Tensor, first: int, last: int) -> Tensor:
        """The weights of outputs from `first` to before `last`, `(inputs, last - first)`."""
        out = torch.empty(self.in_features, last - first, dtype=self.dtype, device=blocks.device)
        if not blocks.is_meta:
            from kvlite.ops.numba_linear import unpack

            unpack(blocks, self.form, first, last, out)
        return out

    def _unpacked_rows(self, blocks: Tensor) -> Tensor:
        """All weights of blocks as a file has them, `(outputs, inputs)`."""
        out = torch.empty(len(blocks), self.in_features, dtype=self.dtype, device=blocks.device)
        if not blocks.is_meta:
            from kvlite.ops.triton_linear import unpack

            unpack(blocks, self.form, out)
        return out


def in_bfloat16(module: nn.Module) -> bool:
    """Whether a module multiplies many rows in bfloat16."""
    return any(isinstance(each, PackedWeights) and each.in_bfloat16 for each in module.modules())


class PackedLinear(nn.Module):
    """A linear layer of packed weights that takes the place of a plain one.

    Attributes:
        columns: the order in which blocks have the inputs, `(inputs,)`, where it is another.
    """

    def __init__(
        self, weight: PackedWeights, bias: Tensor | None = None, columns: Tensor | None = None
    ) -> None:
        """`columns`: for each input, where the blocks have it."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.register_buffer("columns", None if columns is None else columns.argsort(), False)

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`, of the input's dtype."""
        if isinstance(self.columns, Tensor):
            input = input[..., self.columns]
        out = self.weight.product(input.reshape(-1, self.weight.in_features))
        out = out.view(*input.shape[:-1], self.weight.out_features)
        return out if self.bias is None else out + self.bias


class PackedEmbedding(nn.Module):
    """An embedding of packed weights that takes the place of a plain one.

    Attributes:
        multiplier: what embeddings are multiplied by, if the model does that (gemma).
    """

    def __init__(self, weight: PackedWeights, multiplier: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("multiplier", multiplier, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings `(..., inputs)` of ids `(...)`."""
        found = self.weight.of_outputs(ids.flatten())
        if isinstance(self.multiplier, Tensor):
            found = found * self.multiplier.to(found.dtype)
        return found.view(*ids.shape, self.weight.in_features)
