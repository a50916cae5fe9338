"""A decoder layer with packed weights taken apart, on a CPU: arrays go from one compiled loop to
the next, as each of torch's functions takes longer than most of these loops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvlite.model.attention_interface import Attender
from kvlite.model.packed_linear import PackedLinear
from kvlite.model.token_layer import Rotation, Structure, TokenLayer

Array = np.ndarray
Product = Callable[[Array], Array]


class PackedTokenLayer(TokenLayer):
    """As `TokenLayer`, to rounding."""

    @staticmethod
    def takes(module: Any, structure: Structure) -> bool:
        """Whether a layer is one for it."""
        mlp = module.mlp
        gates = type(getattr(mlp, structure.activation)).__name__ == "SiLUActivation"
        down = mlp.down_proj
        packed = isinstance(down, PackedLinear) and down.weight.blocks.is_cpu
        return packed and gates and structure.after is None

    def __init__(self, module: Any, structure: Structure, kv_heads: int) -> None:
        """As for a `TokenLayer`."""
        from kvlite.ops import numba_layer_ops as ops

        super().__init__(module, structure, kv_heads)
        attention, mlp = module.self_attn, module.mlp
        self.loops = ops
        self.norms = [ops.ArrayNorm.of(norm) for norm in self.before]
        heads = self.head_norms
        self.norms_of_heads = (
            (ops.NO_NORM, ops.NO_NORM) if heads is None else tuple(map(ops.ArrayNorm.of, heads))
        )
        self.to_qkv = [_product(getattr(attention, name)) for name in structure.qkv]
        self.to_gate_up = [_product(getattr(mlp, name)) for name in structure.gate_up]
        self.to_out, self.to_hidden = _product(attention.o_proj), _product(mlp.down_proj)
        self.edges = [self.sizes[0], self.sizes[0] + self.sizes[1]]

    def __call__(
        self, hidden: Tensor, *, position_embeddings: Rotation, kvlite: Attender, **_: Any
    ) -> Tensor:
        """As the module: hidden states `(batch, 1, hidden size)`."""
        loops, x = self.loops, hidden.numpy()[:, 0]
        seen = loops.normed(x, self.norms[0])
        parts = [product(seen) for product in self.to_qkv]
        heads = len(x), -1, self.head_dim
        made = parts if len(parts) > 1 else np.split(parts[0], self.edges, 1)
        q, k, v = (part.reshape(heads) for part in made)
        cos, sin = position_embeddings
        loops.turn(q, k, self.norms_of_heads, cos.numpy(), sin.numpy())
        asked, keys, values = (torch.from_numpy(each).unsqueeze(2) for each in (q, k, v))
        out = kvlite.attend(asked, keys, values, self.softmax)
        total = self.to_out(out.numpy().reshape(len(x), -1))
        seen = loops.added(x, total, self.norms[1])
        parts = [product(seen) for product in self.to_gate_up]
        gate, up = parts if len(parts) > 1 else np.split(parts[0], 2, 1)
        loops.gate(gate, up)
        out = torch.from_numpy(total).add_(torch.from_numpy(self.to_hidden(up)))
        return out.unsqueeze(1)


def _product(linear: nn.Module) -> Product:
    """A linear layer's product with rows `(n, inputs)`."""
    if not isinstance(linear, PackedLinear):
        return partial(_of_tensors, linear.forward)
    multiply, bias = linear.weight.multiply, linear.bias
    return multiply if bias is None else partial(_plus, multiply, bias.detach().numpy())


def _of_tensors(product: Callable[[Tensor], Tensor], rows: Array) -> Array:
    return product(torch.from_numpy(rows)).numpy()


def _plus(multiply: Product, bias: Array, rows: Array) -> Array:
    out = multiply(rows)
    out += bias
    return out
