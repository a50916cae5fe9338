"""A decoder layer with packed weights taken apart, on a CPU: one compiled call before attention and
one after it, as each of torch's functions takes longer than most of what these do."""

from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlite.model.attention_interface import Attender
from kvlite.model.packed_linear import PackedLinear
from kvlite.model.token_layer import Rotation, TokenLayer, activation_of, linears_of


class PackedTokenLayer(TokenLayer):
    """As `TokenLayer`, to rounding."""

    @staticmethod
    def takes(module: Any) -> bool:
        """Whether a layer is one for it."""
        return (
            all(
                isinstance(each, PackedLinear) and each.weight.blocks.is_cpu
                for each in chain(*linears_of(module))
            )
            and {each.dtype for each in module.parameters()} <= {torch.float32, torch.uint8}
            and activation_of(module.mlp) == "SiLUActivation"
            and not hasattr(module, "pre_feedforward_layernorm")
        )

    def __init__(self, module: Any, kv_heads: int) -> None:
        from kvlite.ops.numba_layer_ops import LayerWeights, array_norms
        from kvlite.ops.numba_linear import joined, product

        super().__init__(module, kv_heads)
        linears, norms = linears_of(module), (*self.before, *(self.head_norms or ()))
        parts = [
            joined(*(product(each.weight.blocks, each.weight.form, each.bias) for each in some))
            for some in linears
        ]
        # Compiled loops are told where these lie, also once a module has been given others.
        self.held = [norm.weight.detach() for norm in norms]
        self.held += [part.detach() for each in chain(*linears) for part in each.parameters()]
        own = array_norms(self.before[0], *(self.head_norms or (None, None)), self.before[1])
        heads = self.sizes[0] // self.head_dim, kv_heads
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
