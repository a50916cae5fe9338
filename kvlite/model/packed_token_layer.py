"""A decoder layer with packed weights taken apart, on a CPU: one compiled call before attention and
one after it, as each of torch's functions takes longer than most of what these do."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvlite.model.attention_interface import Attender
from kvlite.model.packed_linear import PackedLinear
from kvlite.model.token_layer import Rotation, Structure, TokenLayer


class PackedTokenLayer(TokenLayer):
    """As `TokenLayer`, to rounding."""

    @staticmethod
    def takes(module: Any, structure: Structure) -> bool:
        """Whether a layer is one for it."""
        attention, mlp = module.self_attn, module.mlp
        linears = [
            *(getattr(attention, name) for name in (*structure.qkv, "o_proj")),
            *(getattr(mlp, name) for name in (*structure.gate_up, "down_proj")),
        ]
        packed = all(
            isinstance(each, PackedLinear) and each.weight.blocks.is_cpu for each in linears
        )
        gates = type(getattr(mlp, structure.activation)).__name__ == "SiLUActivation"
        return packed and gates and structure.after is None

    def __init__(self, module: Any, structure: Structure, kv_heads: int) -> None:
        """As for a `TokenLayer`."""
        from kvlite.ops import numba_layer_ops as loops
        from kvlite.ops.numba_linear import Products, joined, product

        super().__init__(module, structure, kv_heads)

        def products(owner: Any, names: Sequence[str]) -> Products:
            linears = [getattr(owner, name) for name in names]
            return joined(
                *(product(each.weight.blocks, each.weight.form, each.bias) for each in linears)
            )

        attention, mlp = module.self_attn, module.mlp
        own = [loops.array_norm(norm) for norm in self.head_norms or ()] or [loops.NO_NORM] * 2
        self.heads = self.sizes[0] // self.head_dim, kv_heads
        self.to_heads = partial(
            loops.to_heads,
            loops.array_norm(self.before[0]),
            products(attention, structure.qkv),
            (own[0], own[1]),
            self.heads,
        )
        self.to_hidden = partial(
            loops.to_hidden,
            products(attention, ["o_proj"]),
            loops.array_norm(self.before[1]),
            products(mlp, structure.gate_up),
            products(mlp, ["down_proj"]),
        )

    def __call__(
        self, hidden: Tensor, *, position_embeddings: Rotation, kvlite: Attender, **_: Any
    ) -> Tensor:
        """As the module: hidden states `(batch, 1, hidden size)`."""
        x, (cos, sin), (every, own) = hidden.numpy()[:, 0], position_embeddings, self.heads
        made = self.to_heads(x, cos.numpy(), sin.numpy())[:, :, None]
        parts = made[:, :every], made[:, every : every + own], made[:, every + own :]
        q, k, v = (torch.from_numpy(part) for part in parts)
        out = kvlite.attend(q, k, v, self.softmax).numpy().reshape(len(x), -1)
        return torch.from_numpy(self.to_hidden(x, out)).unsqueeze(1)
