"""Matrix-vector products on all cores: MKL runs the products of a single row on one core, which
leaves a decode step on a CPU at a third of the memory bandwidth (docs/benchmarks.md)."""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SplitLinear(nn.Linear):
    """A linear layer that shares its weights out among the cores when given a single vector.

    It takes over the weights of the layer it replaces. A layer with at least as many outputs as
    inputs stores them input by input, which reads faster, and splits the inputs; another one
    splits the outputs. The products are the same up to the order of summation.
    """

    def __init__(self, linear: nn.Linear, *, move: bool) -> None:
        """`move` says that the weights may be laid out anew (they are not shared)."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        cores = torch.get_num_threads()
        self.by_input = move and self.out_features >= self.in_features
        split = self.in_features if self.by_input else self.out_features
        self.cores = cores if split % cores == 0 else 1
        if self.by_input:
            self.weight.data = self.weight.data.t().contiguous().t()
            self.shares = self.weight.data.t().view(self.cores, -1, self.out_features)
        else:
            self.shares = self.weight.data.view(self.cores, -1, self.in_features).mT

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`."""
        if input.numel() != self.in_features or self.cores == 1:
            return F.linear(input, self.weight, self.bias)
        if self.by_input:
            out = torch.bmm(input.view(self.cores, 1, -1), self.shares).sum(0)
        else:
            row = input.view(1, 1, -1).expand(self.cores, 1, self.in_features)
            out = torch.bmm(row, self.shares)
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def split_linears(module: nn.Module, shared: Collection[Tensor] = ()) -> None:
    """Replace every plain linear layer within `module`, in place.

    Args:
        shared: weights that others use too, as a tied embedding; they keep their layout.
    """
    fixed = {weight.data_ptr() for weight in shared}
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, SplitLinear(child, move=child.weight.data_ptr() not in fixed))
        else:
            split_linears(child, shared)
