"""`layer_ops` on CUDA, one kernel each.

Numbers are those of `layer_ops` to rounding: what torch rounds after every operator is rounded once
here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.layer_ops import Norm

BLOCK = 1024


def normed(x: Tensor, norm: Norm) -> Tensor:
    """As `layer_ops.normed`."""
    return _normed(x, x, norm, adds=False)


def added(x: Tensor, more: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """As `layer_ops.added`."""
    return more, _normed(x, more, norm, adds=True)


def _normed(x: Tensor, more: Tensor, norm: Norm, *, adds: bool) -> Tensor:
    dim, out = x.shape[-1], torch.empty_like(x)
    wide = triton.next_power_of_2(dim)
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(x):
        _norm[x.numel() // dim,](
            x, more, norm.weight, out, norm.eps,
            DIM=dim, WIDE=wide, ADDS=adds, FROM_ONE=norm.from_one,
            num_warps=min(16, max(1, wide // 512)),
        )  # fmt: skip
    return out


def turned(
    q: Tensor, k: Tensor, norms: tuple[Norm, Norm] | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """As `layer_ops.turned`."""
    (batch, heads, dim), kv_heads = q.shape, k.shape[1]
    of_q, of_k = (Norm(cos, 0.0), Norm(cos, 0.0)) if norms is None else norms
    out_q, out_k = q.new_empty(q.shape), k.new_empty(k.shape)
    with torch.cuda.device_of(q):
        _turn[batch, heads + kv_heads](
            q, k, of_q.weight, of_k.weight, cos, sin, out_q, out_k, q.stride(0), k.stride(0),
            cos.shape[-1] if len(cos) > 1 else 0, heads, kv_heads, of_q.eps,
            DIM=dim, WIDE=triton.next_power_of_2(dim), HALF=cos.shape[-1] // 2,
            NORMS=norms is not None, FROM_ONE=of_q.from_one,
            num_warps=1,
        )  # fmt: skip
    return out_q, out_k


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As `layer_ops.gated`."""
    out = up.new_empty(up.shape)
    width = up.shape[-1]
    with torch.cuda.device_of(up):
        _gate[up.numel() // width, triton.cdiv(width, BLOCK)](
            gate, up, out, gate.stride(0), up.stride(0), width,
            GELU=activation == "GELUTanh", BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _norm(
    x, more, weight, out, eps,
    DIM: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr, FROM_ONE: tl.constexpr,
):  # fmt: skip
    """A row; `more` becomes the sum of both, if it adds."""
    channels = tl.arange(0, WIDE)
    inside = channels < DIM
    at = tl.program_id(0).to(tl.int64) * DIM + channels
    own = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        own += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        total = own.to(more.dtype.element_ty)
        tl.store(more + at, total, mask=inside)
        own = total.to(tl.float32)
    own *= tl.rsqrt(tl.sum(own * own, 0) / DIM + eps)
    scale = tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, _scaled(own, scale, out, FROM_ONE), mask=inside)


@triton.jit
def _scaled(own, scale, out, FROM_ONE: tl.constexpr):
    kind = out.dtype.element_ty
    made = own * (1.0 + scale) if FROM_ONE else own.to(kind).to(tl.float32) * scale
    return made.to(kind)


@triton.jit
def _turn(
    q, k, q_weight, k_weight, cos, sin, out_q, out_k,
    q_batch, k_batch, t_batch,
    heads, kv_heads, eps,
    DIM: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
    FROM_ONE: tl.constexpr,
):  # fmt: skip
    # Each channel comes together with the one it is turned against.
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < heads:
        x = q + batch * q_batch + head * DIM
        out = out_q + (batch * heads + head) * DIM
        weight = q_weight
    else:
        x = k + batch * k_batch + (head - heads) * DIM
        out = out_k + (batch * kv_heads + head - heads) * DIM
        weight = k_weight
    channels = tl.arange(0, WIDE)
    inside, moving = channels < DIM, channels < 2 * HALF
    others = tl.where(channels < HALF, channels + HALF, channels - HALF)
    own = tl.load(x + channels, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + others, mask=moving, other=0.0).to(tl.float32)
    if NORMS:
        size = tl.rsqrt(tl.sum(own * own, 0) / DIM + eps)
        scale = tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
        own = _scaled(own * size, scale, out, FROM_ONE).to(tl.float32)
        scale = tl.load(weight + others, mask=moving, other=0.0).to(tl.float32)
        other = _scaled(other * size, scale, out, FROM_ONE).to(tl.float32)
    by = tl.load(cos + batch * t_batch + channels, mask=moving, other=1.0).to(tl.float32)
    against = tl.load(sin + batch * t_batch + channels, mask=moving, other=0.0).to(tl.float32)
    other = tl.where(channels < HALF, -other, other)
    tl.store(out + channels, (own * by + other * against).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate, up, out, g_row, u_row, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < width
    x = tl.load(gate + row * g_row + channels, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        bent = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # (1 + tanh) / 2
        x *= 1.0 - 1.0 / (1.0 + tl.exp(2.0 * bent))
    else:
        x *= 1.0 / (1.0 + tl.exp(-x))
    x = x.to(out.dtype.element_ty).to(tl.float32)
    x *= tl.load(up + row * u_row + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + channels, x.to(out.dtype.element_ty), mask=inside)
