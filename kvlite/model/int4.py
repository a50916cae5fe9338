"""4-bit weights for a CPU: groups of 32 along the inputs, each with a scale and an offset.

Q4_0 and Q4_1 blocks of a GGUF file hold the same, so their weights are recovered exactly, except
that scales and offsets are bfloat16 here. A few tokens multiply the packed weights
(`torch._weight_int4pack_mm_for_cpu`); many tokens multiply weights that are unpacked for them,
which costs little beside the product.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32
# Up to this many rows, the packed product is faster than unpacking.
FEW_ROWS = 8
_ZERO_CODE = 8
_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
_multiply = torch.ops.aten._weight_int4pack_mm_for_cpu


class Int4Linear(nn.Module):
    """A linear layer of 4-bit weights that takes the place of a plain one.

    Attributes:
        packed: `(padded outputs, inputs / 2)` uint8, in blocks of as many outputs as the CPU's
            vectors take.
        scales: `(inputs / 32, padded outputs, 2)` bfloat16, scale and offset of each group: a
            weight is `(code - 8) * scale + offset`.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        codes, scales = quantize(F.pad(linear.weight.data, (0, 0, 0, -len(linear.weight) % 64)))
        self.register_buffer("packed", _pack(codes, 1))
        self.register_buffer("scales", scales)

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`, in the input's type."""
        rows = input.reshape(-1, self.in_features)
        out: Tensor
        if len(rows) <= FEW_ROWS:
            out = _multiply(rows.bfloat16(), self.packed, GROUP, self.scales).to(input.dtype)
        else:
            out = rows @ self.unpacked(input.dtype)
        out = out[:, : self.out_features].view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weights, transposed: `(inputs, padded outputs)`."""
        block = _outputs_a_block()
        outputs, inputs = len(self.packed), self.in_features
        pairs = self.packed.view(outputs // block, inputs, block // 2).transpose(0, 1)
        weight = torch.cat([pairs & 15, pairs >> 4], 2).view(-1, GROUP, outputs).to(dtype)
        scale, offset = self.scales.to(dtype)[:, None].unbind(-1)
        return weight.sub_(_ZERO_CODE).mul_(scale).add_(offset).view(inputs, outputs)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15, `(outputs, inputs)` int32, and the bfloat16 scale and offset of each group,
    `(inputs / 32, outputs, 2)`, of weights `(outputs, inputs)`."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2)
    scale = (high - low) / 15
    scales = torch.stack([scale, low + _ZERO_CODE * scale], -1).bfloat16()
    scale, offset = scales.float()[:, :, None].unbind(-1)
    codes = (groups - offset).div_(scale.clamp(min=1e-30)).add_(_ZERO_CODE)
    codes = codes.round_().clamp_(0, 15).to(torch.int32).flatten(1)
    return codes, scales.transpose(0, 1).contiguous()


def can_pack() -> bool:
    """Whether this machine's torch packs 4-bit weights in an order that is known here."""
    return _outputs_a_block() > 0


def pack_linears(module: nn.Module) -> None:
    """Replace, in place, every plain linear layer within `module` whose inputs come in whole
    groups."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and child.in_features % GROUP == 0:
            setattr(module, name, Int4Linear(child))
        else:
            pack_linears(child)


@cache
def _outputs_a_block() -> int:
    """How many outputs lie together in packed weights: in a block, each byte has the code of an
    output of the first half, and above it that of one of the second. 0 if it is not so here."""
    codes = torch.arange(64, dtype=torch.int32)[:, None].expand(64, 2)
    codes = torch.stack([codes % 16, codes // 16])
    low, high = (_pack(each.contiguous(), 1).flatten().int() for each in codes)
    for block in (64, 32):
        half = torch.arange(64).view(-1, 1, 2, block // 2).expand(-1, 2, -1, -1)
        first, second = (half[:, :, part].flatten() for part in (0, 1))
        if torch.equal(low, first % 16 + 16 * (second % 16)) and torch.equal(
            high, first // 16 + 16 * (second // 16)
        ):
            return block
    return 0
