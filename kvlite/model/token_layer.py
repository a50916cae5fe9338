"""A decoder layer taken apart into its weights, for steps of one token a sequence.

A step through transformers' module spends more time on calls than on products. Here the same
products are joined by as few calls as can be.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlite.model.attention_interface import Attender
from kvlite.model.packed_linear import PackedLinear, PackedWeights
from kvlite.ops import layer_ops
from kvlite.ops.device import has_triton
from kvlite.ops.layer_ops import ACTIVATIONS, Norm
from kvlite.ops.softmax import Softmax

Rotation = tuple[Tensor, Tensor]


# Classes of transformers' whose layers may be taken apart (`step_layers` compares them).
_NAMES = ("Gemma2", "Gemma3", "Llama", "Mistral", "Phi3", "Qwen2", "Qwen3", "SeedOss", "SmolLM3")
KNOWN = frozenset(f"{name}DecoderLayer" for name in _NAMES)


def _linears_of(module: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """A layer's projections to queries, keys and values, or to all three; attention's output; the
    MLP's gate and up, or both in one; and down."""
    attention, mlp = module.self_attn, module.mlp
    heads = [attention.qkv_proj] if hasattr(attention, "qkv_proj") else None
    inner = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else None
    return (
        heads or [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        inner or [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    )


def _norms(*modules: Any) -> tuple[Norm, ...]:
    """Gemma's, which are from one, have their own name of epsilon."""
    return tuple(
        Norm(each.weight, each.eps, True)
        if hasattr(each, "eps")
        else Norm(each.weight, each.variance_epsilon, False)
        for each in modules
    )


class TokenLayer:
    """A decoder layer without its modules; called like one, with one token a sequence.

    It holds the modules' own weights, and copies none.

    Attributes:
        before, after: the norms of what goes into attention and MLP and of what comes out.
        head_norms: of queries and keys, a head at a time.
    """

    def __init__(self, module: Any, kv_heads: int) -> None:
        """Take a layer apart. Raises AttributeError or KeyError if it is another one."""
        attention, mlp = module.self_attn, module.mlp
        into_mlp, self.after = module.post_attention_layernorm, _norms()
        if hasattr(module, "pre_feedforward_layernorm"):
            self.after = _norms(into_mlp, module.post_feedforward_layernorm)
            into_mlp = module.pre_feedforward_layernorm
        self.before = _norms(module.input_layernorm, into_mlp)
        has_norms = hasattr(attention, "q_norm")
        self.head_norms = _norms(attention.q_norm, attention.k_norm) if has_norms else None
        heads, (out,), inner, (down,) = _linears_of(module)
        self.qkv, self.gate_up = _Together(heads), _Together(inner)
        self.out, self.down = out.forward, down.forward
        self.add_down = partial(_added_in_place if _plain(down) else _added, down)
        self.activation = _activation_of(mlp)
        ACTIVATIONS[self.activation]
        cap = getattr(attention, "attn_logit_softcapping", None) if self.after else None
        self.softmax = Softmax(attention.scaling, cap, None)
        self.head_dim = attention.head_dim
        every, own = attention.config.num_attention_heads * self.head_dim, kv_heads * self.head_dim
        self.ops = _ops_for(down)
        self.sizes = [every, own, own]

    def __call__(
        self, hidden: Tensor, *, position_embeddings: Rotation, kvlite: Attender, **_: Any
    ) -> Tensor:
        """As the module: hidden states `(batch, 1, hidden size)`."""
        ops, batch = self.ops, len(hidden)
        heads = batch, -1, self.head_dim
        q, k, v = self.qkv(ops.normed(hidden, self.before[0]), self.sizes)
        q, k = ops.turned(q.view(heads), k.view(heads), self.head_norms, *position_embeddings)
        given = q[:, :, None], k[:, :, None], v.view(heads)[:, :, None]
        out = self.out(kvlite.attend(*given, self.softmax).reshape(batch, 1, -1))
        if self.after:
            out = ops.normed(out, self.after[0])
        hidden, seen = ops.added(hidden, out, self.before[1])
        gate, up = self.gate_up(seen, None)
        inner = ops.gated(gate, up, self.activation)
        if self.after:
            return hidden + ops.normed(self.down(inner), self.after[1])  # type: ignore[no-any-return]
        return self.add_down(hidden, inner)


class PackedTokenLayer(TokenLayer):
    """As `TokenLayer`, to rounding, of packed weights on a CPU: one compiled call before attention
    and one after it, as each of torch's functions takes longer than most of what these do."""

    @property
    def compiled(self) -> "PackedTokenLayer":
        """Itself: one call takes tokens through several such layers."""
        return self

    @staticmethod
    def takes(module: Any) -> bool:
        """Whether a layer is one for it."""
        return (
            all(
                isinstance(each, PackedLinear) and each.weight.blocks.is_cpu
                for each in chain(*_linears_of(module))
            )
            and {each.dtype for each in module.parameters()} <= {torch.float32, torch.uint8}
            and _activation_of(module.mlp) == "SiLUActivation"
            and not hasattr(module, "pre_feedforward_layernorm")
        )

    def __init__(self, module: Any, kv_heads: int) -> None:
        from kvlite.ops.numba_layer_ops import LayerWeights, array_norms
        from kvlite.ops.numba_linear import joined, product

        super().__init__(module, kv_heads)
        linears, norms = _linears_of(module), (*self.before, *(self.head_norms or ()))
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


def _activation_of(mlp: Any) -> str:
    return type(getattr(mlp, "act_fn", None) or mlp.activation_fn).__name__


def _ops_for(product: nn.Module) -> Any:
    if not has_triton(next(product.parameters()).device):
        return layer_ops
    from kvlite.ops import triton_layer_ops

    return triton_layer_ops


class _Together:
    """Linear layers of one input; on CUDA their weights are moved together, so that it is one
    product."""

    def __init__(self, modules: list[Any]) -> None:
        self.products = [module.forward for module in modules]
        if len(modules) > 1 and (_plain(*modules) or _packed_alike(*modules)):
            self.products = [_product_of_all(modules)]

    def __call__(self, x: Tensor, sizes: list[int] | None) -> list[Tensor]:
        if len(self.products) > 1:
            return [product(x) for product in self.products]
        out = self.products[0](x)
        return list(out.chunk(2, -1) if sizes is None else out.split(sizes, -1))


def _plain(*modules: nn.Module) -> bool:
    """Whether these are linear layers of transformers' on CUDA, neither quantized nor streamed."""
    return all(
        type(each) is nn.Linear and each.weight.is_cuda and "forward" not in vars(each)
        for each in modules
    )


def _packed_alike(*modules: nn.Module) -> bool:
    packed = [each.weight for each in modules if isinstance(each, PackedLinear)]
    alike = len({each.form for each in packed}) == 1 and len(packed) == len(modules)
    return alike and all(each.blocks.is_cuda for each in packed)


def _product_of_all(modules: list[Any]) -> Callable[[Tensor], Tensor]:
    biases = [module.bias for module in modules if module.bias is not None]
    bias = _joined(biases) if biases else None
    weights = [module.weight for module in modules]
    if isinstance(weights[0], nn.Parameter):
        return partial(F.linear, weight=_joined(weights), bias=bias)
    blocks = _joined([weight.blocks for weight in weights])
    whole = PackedWeights(blocks, weights[0].form, weights[0].dtype)
    return PackedLinear(whole, bias).forward


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Parameters one after the other in one piece of memory, which is theirs from here on."""
    whole = torch.cat([each.data for each in parameters])
    parts = whole.split([len(each) for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole


def _added(linear: Any, total: Tensor, x: Tensor) -> Tensor:
    return total + linear.forward(x)  # type: ignore[no-any-return]


def _added_in_place(linear: nn.Linear, total: Tensor, x: Tensor) -> Tensor:
    total.view(len(total), -1).addmm_(x.view(len(x), -1), linear.weight.t())
    return total if linear.bias is None else total.add_(linear.bias)
