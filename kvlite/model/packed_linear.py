"""Layers whose weights stay in the blocks of a GGUF file (`ops.blocks`).

A few tokens multiply the packed weights; many tokens multiply weights that are unpacked for them,
which costs little beside the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlite.ops.blocks import BlockFormat
from kvlite.ops.device import MANY_ROWS, has_bfloat16

# Up to this many rows, the packed product is faster than unpacking.
FEW_ROWS = 8
# Weights that a CPU unpacks at once, for products that are large enough to be fast.
UNPACKED = 1 << 20


def for_cpu(blocks: Tensor, form: BlockFormat) -> Tensor:
    """Blocks as a file has them, `(..., outputs, bytes of one)`, as a CPU's loops take them: a
    contiguous copy `(..., bytes of one, outputs)`, with codes of Q8_0 from 0 on."""
    blocks = blocks.mT.clone(memory_format=torch.contiguous_format)
    if form.name == "Q8_0":
        blocks.unflatten(-2, (-1, form.nbytes))[..., 2:, :] ^= 128
    return blocks


def is_for_cpu(blocks: Tensor, dtype: torch.dtype) -> bool:
    """Whether products are formed on a CPU. As elsewhere, float32 is planned as there."""
    return blocks.is_cpu or (blocks.is_meta and dtype == torch.float32)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of packed weights, where it lies.

    Attributes:
        blocks: uint8; `(outputs, bytes of one)` as in a file or, `on_cpu`, as of `for_cpu`.
        dtype: what weights are unpacked to, and the type of products.
        on_cpu: whether products are formed there.
    """

    blocks: Tensor
    form: BlockFormat
    dtype: torch.dtype
    on_cpu: bool

    @property
    def out_features(self) -> int:
        """Its outputs."""
        return self.blocks.shape[1 if self.on_cpu else 0]

    @property
    def in_features(self) -> int:
        """Its inputs."""
        return self.blocks.shape[0 if self.on_cpu else 1] // self.form.nbytes * self.form.inputs

    @property
    def in_bfloat16(self) -> bool:
        """Whether many rows and weights are multiplied in bfloat16."""
        return self.on_cpu and self.dtype == torch.float32 and has_bfloat16()

    def product(self, rows: Tensor) -> Tensor:
        """`rows @ weight.T`, `(n, outputs)`, of `(n, inputs)`."""
        return joint_product(rows, [self])

    def of_outputs(self, ids: Tensor) -> Tensor:
        """The weights of some outputs `(n,)`, `(n, inputs)`."""
        if not self.on_cpu:
            return self._unpacked_rows(self.blocks[ids])
        return self._unpacked(self.blocks[:, ids], 0, len(ids)).t().contiguous()

    def outputs(self, own: slice) -> "PackedMatrix":
        """The matrix of some outputs."""
        found = self.blocks[:, own].contiguous() if self.on_cpu else self.blocks[own]
        return replace(self, blocks=found)

    def inputs_of(self, ids: Tensor, own: slice) -> Tensor:
        """Some inputs' weights of some outputs `(n,)`, `(n, own)`."""
        size, nbytes = self.form.inputs, self.form.nbytes
        if own.start % size or own.stop % size:
            return self.of_outputs(ids)[:, own]
        part = slice(own.start // size * nbytes, own.stop // size * nbytes)
        found = self.blocks[part][:, ids] if self.on_cpu else self.blocks[ids, part]
        return replace(self, blocks=found.contiguous()).unpacked()

    def unpacked(self) -> Tensor:
        """All weights, `(outputs, inputs)`."""
        if not self.on_cpu:
            return self._unpacked_rows(self.blocks)
        return self._unpacked(self.blocks, 0, self.out_features).t()

    def many(self, rows: Tensor) -> Tensor:
        """As `product`, with weights that are unpacked for it."""
        if not self.on_cpu:
            return F.linear(rows, self.unpacked())
        if self.in_bfloat16 and len(rows) >= MANY_ROWS <= self.out_features:
            return self._rounded(rows.to(torch.bfloat16, memory_format=torch.contiguous_format))
        out = rows.new_empty(len(rows), self.out_features)
        step = max(64, UNPACKED // self.in_features)
        for first in range(0, self.out_features, step):
            last = min(first + step, self.out_features)
            torch.mm(rows, self._unpacked(self.blocks, first, last), out=out[:, first:last])
        return out

    def _rounded(self, rows: Tensor) -> Tensor:
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


def joint_product(rows: Tensor, matrices: Sequence[PackedMatrix]) -> Tensor:
    """Products of rows with up to 3 matrices on one device, one after the other,
    `(n, all outputs)`."""
    if len(rows) > FEW_ROWS:
        return _beside([each.many(rows) for each in matrices])
    if rows.is_meta:
        return rows.new_empty(len(rows), sum(each.out_features for each in matrices))
    if matrices[0].on_cpu:
        from kvlite.ops.numba_linear import joined, product, products_of

        given = joined(*(product(each.blocks, each.form) for each in matrices))
        return torch.from_numpy(products_of(given, rows.contiguous().numpy()))
    from kvlite.ops.triton_linear import multiply

    return _beside([multiply(rows, each.blocks, each.form) for each in matrices])


def _beside(made: Sequence[Tensor]) -> Tensor:
    return made[0] if len(made) == 1 else torch.cat([*made], -1)


class PackedWeights(nn.Module):
    """A matrix of packed weights whose blocks are a parameter.

    Attributes:
        blocks: as a `PackedMatrix` has them.
        in_bfloat16: whether many rows and weights are multiplied in bfloat16.
    """

    def __init__(self, blocks: Tensor, form: BlockFormat, dtype: torch.dtype) -> None:
        """Take blocks as a file has them, `(outputs, bytes of one)`."""
        super().__init__()
        self.form, self.dtype = form, dtype
        self.on_cpu = is_for_cpu(blocks, dtype)
        held = for_cpu(blocks, form) if self.on_cpu else blocks
        self.blocks = nn.Parameter(held, requires_grad=False)
        matrix = self.matrix
        self.out_features, self.in_features = matrix.out_features, matrix.in_features
        self.in_bfloat16 = matrix.in_bfloat16

    @property
    def matrix(self) -> PackedMatrix:
        """What it multiplies by, where it lies now."""
        return PackedMatrix(self.blocks, self.form, self.dtype, self.on_cpu)


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
        out = self.weight.matrix.product(input.reshape(-1, self.weight.in_features))
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
        return self._scaled(self.weight.matrix.of_outputs(ids.flatten()), ids)

    def of_inputs(self, ids: Tensor, own: slice) -> Tensor:
        """A part of embeddings, `(..., own)` of ids `(...)`."""
        return self._scaled(self.weight.matrix.inputs_of(ids.flatten(), own), ids)

    def _scaled(self, found: Tensor, ids: Tensor) -> Tensor:
        if isinstance(self.multiplier, Tensor):
            found = found * self.multiplier.to(found.dtype)
        return found.view(*ids.shape, -1)
