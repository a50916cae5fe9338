"""Matrix-vector products on all cores: MKL multiplies a single row on one core, so that a decode
step on a CPU gets a third of the memory bandwidth (docs/benchmarks.md)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SplitLinear(nn.Linear):
    """A linear layer that uses all cores for a single vector.

    It takes over the weights of the layer it replaces. A layer with at least as many outputs as
    inputs stores them input by input, which reads faster, splits the inputs and sums up their
    products; another one splits the outputs. A tied embedding follows the layout.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        cores = torch.get_num_threads()
        self.by_input = self.out_features >= self.in_features
        if self.by_input:
            self.parts = _divisor(cores, self.in_features)
            self.weight.data = self.weight.data.t().contiguous().t()
            self.shares = self.weight.data.t().view(self.parts, -1, self.out_features)
        else:
            # Long rows are read faster in smaller parts.
            self.parts = _divisor(2 * cores, self.out_features)
            self.shares = self.weight.data.view(self.parts, -1, self.in_features).mT

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`."""
        if input.numel() != self.in_features:
            return F.linear(input, self.weight, self.bias)
        if self.by_input:
            out = torch.bmm(input.view(self.parts, 1, -1), self.shares).sum(0)
        else:
            row = input.view(1, 1, -1).expand(self.parts, 1, self.in_features)
            out = torch.bmm(row, self.shares)
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def _divisor(parts: int, features: int) -> int:
    return max(n for n in range(1, parts + 1) if features % n == 0)


def split_linears(module: nn.Module) -> None:
    """Replace every plain linear layer within `module`, in place. Quantized ones have another class
    or a `forward` of their own; those whose weights are elsewhere stay as they are."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and not (child.weight.is_meta or "forward" in vars(child)):
            setattr(module, name, SplitLinear(child))
        else:
            split_linears(child)
