"""What each Triton kernel computes, in torch: its twin fills the same tensors, given by the names
of the kernel's arguments. Whoever writes a kernel adds its twin."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kvlite.cache.quantized import packed_codes, unpacked_codes

Arguments = SimpleNamespace


def attend_split(given: Arguments) -> None:
    """All of a head's entries as one split; the others have none."""
    keys = _vectors(given.k_codes, given.k_scales, given.k_zeros, given.K_BITS)
    values = _vectors(given.v_codes, given.v_scales, given.v_zeros, given.V_BITS)
    logits = given.queries @ keys.mT + given.shift[..., None]
    if given.CAPPED:
        logits = given.softcap * torch.tanh(logits / given.softcap)
    if given.lengths is not None:
        beyond = torch.arange(given.count) >= given.lengths[..., None, None]
        logits = logits.masked_fill(beyond, -torch.inf)
    if given.logits is not None:
        given.logits.copy_(logits)
    given.outs.zero_()
    given.lses.fill_(-torch.inf)
    given.outs[:, :, 0] = logits.softmax(-1).nan_to_num() @ values
    given.lses[:, :, 0] = logits.logsumexp(-1)


def merge_splits(given: Arguments) -> None:
    assert given.splits == given.lses.shape[2]
    given.lse.copy_(given.lses.logsumexp(2))
    shares = (given.lses - given.lse[:, :, None]).exp().nan_to_num()
    given.out.copy_((given.outs * shares[..., None]).sum(2))


def logits_of(given: Arguments) -> None:
    used = int(given.used)
    signs, sizes = given.signs[:, :, :used], given.sizes[:, :, None, :used]
    assert given.capacity == given.signs.shape[2] >= given.most >= used
    ones = unpacked_codes(signs, 1)[..., : given.DIM]
    total = given.turned.sum(-1, keepdim=True)
    given.logits[..., :used] = ((2 * given.turned @ ones.mT - total) * sizes).flatten(0, 1)
    given.lses.fill_(-torch.inf)
    given.lses[..., 0] = given.logits[..., :used].logsumexp(-1)


def averaged(given: Arguments) -> None:
    used, whole = int(given.used), given.lses.logsumexp(-1, keepdim=True)
    given.scores.zero_()
    given.scores.flatten(0, 1)[:, :used] = (given.logits[..., :used] - whole).exp().mean(1)


def put_signs(given: Arguments) -> None:
    place, keys = int(given.place), given.keys[:, :, 0].float()
    assert place < given.capacity == given.signs.shape[2]
    turned = (keys - given.mean) * given.balance @ given.rotation
    given.signs[:, :, place] = packed_codes(F.pad(turned > 0, (0, -given.DIM % 64)), 1)
    given.sizes[:, :, place] = turned.abs().mean(-1)


def gather(given: Arguments) -> None:
    """The first head's entries are given, and how far it is to the next."""
    heads, batch = given.grid[1:]
    slots = given.source.shape[-2]
    shape, steps = (batch, heads, given.count), (given.p_batch, given.p_head, 1)
    far = (given.s_batch, given.s_head, given.DIM, 1)
    source = _strided(given.source, (batch, heads, slots, given.DIM), far)
    places = _strided(given.places, shape, steps)
    out = _strided(
        given.out,
        (*shape, given.DIM),
        (*(step * given.DIM for step in steps[:2]), given.DIM, 1),
    )
    assert int(places.max()) < slots
    index = places.clamp(min=0)[..., None].expand(-1, -1, -1, given.DIM)
    out.copy_(torch.where((places >= 0)[..., None], source.gather(2, index), 0))


def exchange(given: Arguments) -> None:
    """The last two dimensions of what is written are dense."""
    comes = given.comes.bool()
    batch, head, _ = comes.nonzero(as_tuple=True)
    at = batch, head, given.slots[comes]
    given.own_keys[at], given.own_values[at] = given.keys[comes], given.values[comes]
    given.own_positions[at] = given.positions[comes].int()
    if given.rows is not None:
        given.rows[at[0], at[1], :, at[2]] = 0.0


def put(given: Arguments) -> None:
    assert given.rows.dtype == given.target.dtype
    place = 0 if given.place is None else int(given.place)
    given.target[:, :, place : place + 1] = given.rows


def attend_ragged(given: Arguments) -> None:
    """Every head's run of slots as one split; the others have nothing."""
    given.outs.zero_()
    given.lses.fill_(-torch.inf)
    for head, (start, last) in enumerate(zip(given.starts, given.last, strict=True)):
        own = slice(int(start), int(last) + 1)
        keys, values = given.keys[:, own].float(), given.values[:, own].float()
        logits = given.queries[:, head].float() @ keys.mT * given.scale
        if given.CAPPED:
            logits = given.softcap * torch.tanh(logits / given.softcap)
        given.outs[:, head, 0] = logits.softmax(-1) @ values
        given.lses[:, head, 0] = logits.logsumexp(-1)


def norm(given: Arguments) -> None:
    x, out = given.x.float().view(-1, given.DIM), given.out
    if given.ADDS:
        given.more.copy_(given.more.float() + given.x.float())
        x = given.more.float().view(-1, given.DIM)
    x = x * (x.square().mean(-1, keepdim=True) + given.eps).rsqrt()
    out.copy_(_scaled(x, given.weight, out.dtype, given.FROM_ONE).view(out.shape))


def turn(given: Arguments) -> None:
    for x, weight, out in (
        (given.q, given.q_weight, given.out_q),
        (given.k, given.k_weight, given.out_k),
    ):
        own = x.float()
        if given.NORMS:
            own = own * (own.square().mean(-1, keepdim=True) + given.eps).rsqrt()
            own = _scaled(own, weight, out.dtype, given.FROM_ONE).to(out.dtype).float()
        first, second, still = own.split([given.HALF, given.HALF, given.DIM - 2 * given.HALF], -1)
        other, moving = torch.cat([-second, first], -1), torch.cat([first, second], -1)
        moving = moving * given.cos.float() + other * given.sin.float()
        out.copy_(torch.cat([moving, still], -1))


def _scaled(x: Tensor, weight: Tensor, dtype: torch.dtype, from_one: bool) -> Tensor:
    return x * (1 + weight.float()) if from_one else x.to(dtype).float() * weight.float()


def gate(given: Arguments) -> None:
    x = given.gate.float()
    x = F.gelu(x, approximate="tanh") if given.GELU else F.silu(x)
    given.out.copy_(x.to(given.out.dtype).float() * given.up.float())


def write(given: Arguments) -> None:
    heads = torch.arange(given.keys.shape[1]) if given.slots is None else given.slots
    for row, into in (
        (given.keys, given.own_keys),
        (given.values, given.own_values),
        (given.position.expand(given.keys.shape[:2]), given.own_positions),
    ):
        assert row.dtype == into.dtype or row is not given.keys
        into[:, heads] = row.to(into.dtype)


def multiply_packed(given: Arguments) -> None:
    assert given.grid[1] == len(given.rows) and given.outputs == len(given.blocks)
    given.out.copy_(given.rows.float() @ _unpacked(given).T)


def unpack(given: Arguments) -> None:
    given.out.copy_(_unpacked(given))


def _unpacked(given: Arguments) -> Tensor:
    return torch.from_numpy(dequantize(given.blocks.numpy(), GGMLQuantizationType(given.KIND)))


TWINS: dict[str, Callable[[Arguments], None]] = {
    "triton_decode._attend_split": attend_split,
    "triton_decode.merge_splits": merge_splits,
    "triton_ragged._attend_split": attend_ragged,
    "triton_topk._logits_of": logits_of,
    "triton_topk._averaged": averaged,
    "triton_topk._put_signs": put_signs,
    "triton_exchange._exchange": exchange,
    "triton_gather._gather": gather,
    "triton_gather._put": put,
    "triton_layer_ops._norm": norm,
    "triton_layer_ops._turn": turn,
    "triton_layer_ops._gate": gate,
    "triton_write._write": write,
    "triton_linear._multiply": multiply_packed,
    "triton_linear._unpack": unpack,
}


def _vectors(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Quantized vectors `(batch, heads, n, dim)`, still rotated."""
    steps = unpacked_codes(codes, bits).unflatten(-1, (scales.shape[2], -1))
    return (steps * scales.mT[..., None].float() + zeros.mT[..., None].float()).flatten(-2)


def _strided(first: Tensor, shape: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    return first.as_strided(shape, steps, first.storage_offset())
