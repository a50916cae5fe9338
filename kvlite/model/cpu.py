"""Matrix-vector products on all cores: MKL runs the products of a single row on one core, which
leaves a decode step on a CPU at a third of the memory bandwidth (docs/benchmarks.md)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SplitLinear(nn.Linear):
    """A linear layer that shares its work out among the cores when given a single vector.

    It takes over the weights of the layer it replaces. A layer with at least as many outputs as
    inputs stores them input by input, which reads faster, and splits the inputs, whose products
    are summed up; another one splits the outputs. A tied embedding follows the layout.
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
    """The most equal parts, up to `parts`, that the features can be cut into."""
    return max(n for n in range(1, parts + 1) if features % n == 0)


def split_linears(module: nn.Module) -> None:
    """Replace every plain linear layer within `module`, in place; quantized ones are of another
    class, or have a `forward` of their own. Those whose weights lie elsewhere stay as they are."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and not (child.weight.is_meta or "forward" in vars(child)):
            setattr(module, name, SplitLinear(child))
        else:
            split_linears(child)
