"""A decoder layer taken apart into its weights, for steps of one token a sequence.

A step through transformers' module spends more time on calls than on products. Here the same
products are joined by as few calls as can be.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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


@dataclass(frozen=True)
class Structure:
    """Where a class of decoder layers has its parts; empty for what it has not.

    Attributes:
        before, after: the norms of what goes into attention and MLP and of what comes out.
        qkv: projections to queries, keys and values, or to all three.
        gate_up: those of the MLP, or both in one.
        activation: the MLP's.
        head_norms: of queries and keys, a head at a time.
        eps: the name of a norm's epsilon.
        from_one: see `Norm`.
    """

    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    head_norms: tuple[str, str] | None = None
    eps: str = "variance_epsilon"
    from_one: bool = False


_HEAD_NORMS = ("q_norm", "k_norm")
_GEMMA: dict[str, Any] = {
    "before": ("input_layernorm", "pre_feedforward_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "eps": "eps",
    "from_one": True,
}
STRUCTURES: Mapping[str, Structure] = {
    "LlamaDecoderLayer": Structure(),
    "MistralDecoderLayer": Structure(),
    "Qwen2DecoderLayer": Structure(),
    "SeedOssDecoderLayer": Structure(),
    "SmolLM3DecoderLayer": Structure(),
    "Qwen3DecoderLayer": Structure(head_norms=_HEAD_NORMS),
    "Phi3DecoderLayer": Structure(
        qkv=("qkv_proj",), gate_up=("gate_up_proj",), activation="activation_fn"
    ),
    "Gemma2DecoderLayer": Structure(**_GEMMA),
    "Gemma3DecoderLayer": Structure(head_norms=_HEAD_NORMS, **_GEMMA),
}


class TokenLayer:
    """A decoder layer without its modules; called like one, with one token a sequence.

    It holds the modules' own weights, and copies none.
    """

    def __init__(self, module: Any, structure: Structure, kv_heads: int) -> None:
        """Take a layer apart. Raises AttributeError or KeyError if it is another one."""
        attention, mlp = module.self_attn, module.mlp

        def norm(owner: Any, name: str) -> Norm:
            part = getattr(owner, name)
            return Norm(part.weight, getattr(part, structure.eps), structure.from_one)

        self.head_dim = attention.head_dim
        self.before = tuple(norm(module, name) for name in structure.before)
        self.after = tuple(norm(module, name) for name in structure.after or ())
        names = structure.head_norms
        self.head_norms = None if names is None else tuple(norm(attention, each) for each in names)
        self.qkv = _Together([getattr(attention, name) for name in structure.qkv])
        self.out = attention.o_proj.forward
        self.gate_up = _Together([getattr(mlp, name) for name in structure.gate_up])
        self.down = mlp.down_proj.forward
        self.add_down = partial(_added_in_place if _plain(mlp.down_proj) else _added, mlp.down_proj)
        self.activation = type(getattr(mlp, structure.activation)).__name__
        ACTIVATIONS[self.activation]
        cap = getattr(attention, "attn_logit_softcapping", None) if structure.after else None
        self.softmax = Softmax(attention.scaling, cap, None)
        every, own = attention.config.num_attention_heads * self.head_dim, kv_heads * self.head_dim
        self.ops = _ops_for(mlp.down_proj)
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
        """What each gives; what comes as one in parts of these sizes, or in halves."""
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
    """Likewise, in one launch and in the place of `total`."""
    total.view(len(total), -1).addmm_(x.view(len(x), -1), linear.weight.t())
    return total if linear.bias is None else total.add_(linear.bias)
