"""A decoder layer with packed weights taken apart, on a CPU: one compiled call before attention and
one after it, as each of torch's functions takes longer than most of what these do."""

from collections.abc import Sequence
from typing import Any

import numpy as np
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
        plain = all(
            each.dtype == torch.float32 for each in module.parameters() if each.is_floating_point()
        )
        gates = type(getattr(mlp, structure.activation)).__name__ == "SiLUActivation"
        return packed and plain and gates and structure.after is None

    def __init__(self, module: Any, structure: Structure, kv_heads: int) -> None:
        """As for a `TokenLayer`."""
        from kvlite.ops.numba_layer_ops import LayerWeights, array_norms
        from kvlite.ops.numba_linear import joined, product

        super().__init__(module, structure, kv_heads)

        def products(owner: Any, names: Sequence[str]) -> Any:
            linears = [getattr(owner, name) for name in names]
            for each in linears:
                self.held += [part.detach() for part in each.parameters()]
            return joined(
                *(product(each.weight.blocks, each.weight.form, each.bias) for each in linears)
            )

        attention, mlp = module.self_attn, module.mlp
        norms = *self.before, *(self.head_norms or ())
        # Compiled loops are told where these lie, also once a module has been given others.
        self.held = [norm.weight.detach() for norm in norms]
        of_queries, of_keys = self.head_norms or (None, None)
        parts = [
            products(attention, structure.qkv),
            products(attention, ["o_proj"]),
            products(mlp, structure.gate_up),
            products(mlp, ["down_proj"]),
        ]
        heads = self.sizes[0] // self.head_dim, kv_heads
        own = array_norms(self.before[0], of_queries, of_keys, self.before[1])
        self.weights = LayerWeights(own, np.stack(parts), heads)

    def __call__(
        self, hidden: Tensor, *, position_embeddings: Rotation, kvlite: Attender, **_: Any
    ) -> Tensor:
        """As the module: hidden states `(batch, 1, hidden size)`."""
        x, (cos, sin), (every, own) = hidden.numpy()[:, 0], position_embeddings, self.weights.heads
        made = self.weights.to_heads(x, cos.numpy(), sin.numpy())[:, :, None]
        parts = made[:, :every], made[:, every : every + own], made[:, every + own :]
        q, k, v = (torch.from_numpy(part) for part in parts)
        out = kvlite.attend(q, k, v, self.softmax).numpy().reshape(len(x), -1)
        return torch.from_numpy(self.weights.to_hidden(x, out)).unsqueeze(1)
