"""What each Triton kernel computes, in torch: its twin fills the same tensors, given by the names
of the kernel's arguments. Whoever writes a kernel adds its twin."""

from collections.abc import Callable
from math import e, log2
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvlite.cache.quantization.affine import packed_codes, quantized, unpacked_codes

Arguments = SimpleNamespace


def attend_split(given: Arguments) -> None:
    """All of a head's entries as one split; the others have none."""
    keys = _vectors(given.k_codes, given.k_scales, given.k_zeros, given.K_BITS)
    values = _vectors(given.v_codes, given.v_scales, given.v_zeros, given.V_BITS)
    logits = given.queries @ keys.mT + given.shift[..., None]
    if given.softcap is not None:
        logits = given.softcap * torch.tanh(logits / given.softcap)
    held = int(given.given)
    assert given.COUNTED or held == logits.shape[-1]
    logits[..., held:] = -torch.inf
    if given.logits is not None:
        given.logits[..., :held] = logits[..., :held]
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


def tell(given: Arguments) -> None:
    assert given.capacity == given.signs.shape[2]
    if given.queries is not None:
        asked = given.queries.float() * given.scale / given.balance[:, :, None]
        given.turned.copy_(asked @ given.rotation)
    if given.keys is None:
        return
    own = slice(int(given.place), int(given.place) + given.keys.shape[2])
    if given.to_keys is not None:
        for rows, to in ((given.keys, given.to_keys), (given.values, given.to_values)):
            assert rows.dtype == to.dtype
            to[:, :, own] = rows
    keys = (given.keys.float() - given.mean[:, :, None]) * given.balance[:, :, None]
    keys = keys @ given.rotation
    given.signs[:, :, own] = packed_codes(F.pad(keys > 0, (0, -given.DIM % 64)), 1)
    given.sizes[:, :, own] = keys.abs().mean(-1)


def survey(given: Arguments) -> None:
    assert given.grid[0] * given.SCANNED >= max(given.entries, given.slots)
    scores, filled = given.scores.nan_to_num().clamp(min=0), int(given.seen)
    given.maxima.fill_(-1)
    for group in range(-(-filled // given.NEIGHBORS)):
        at = group * given.NEIGHBORS
        near = scores[:, :, at : min(at + given.NEIGHBORS, filled)]
        given.maxima[:, group] = near.amax(2).view(torch.int32).flatten()
    places = given.positions
    if given.packed_positions is not None:
        places = torch.cat([places, given.packed_positions], 2)
    places = places.long()
    slots = torch.arange(given.slots, dtype=torch.int32).expand(places.shape).flatten(0, 1)
    given.slot_of.fill_(-1).scatter_(1, places.flatten(0, 1), slots)
    worth = 0x7F800000 - scores.gather(2, places).view(torch.int32)
    given.worth.copy_(torch.where(places < filled, worth, 0).flatten(0, 1))


def name(given: Arguments) -> None:
    scores, filled = given.scores.nan_to_num(), int(given.seen)
    assert given.wanted <= filled < given.entries + 1 == scores.shape[2] + 1
    assert given.maxima.shape[1] <= given.GROUPS
    between = scores[:, :, given.FIRST : filled - given.RECENT]
    likeliest = between.sort(dim=-1, descending=True, stable=True).indices
    chosen = likeliest[:, :, : given.wanted - given.FIRST - given.RECENT] + given.FIRST
    ends = torch.cat([torch.arange(given.FIRST), torch.arange(filled - given.RECENT, filled)])
    named = torch.cat([ends.expand(*chosen.shape[:2], -1), chosen], 2).sort(-1).values
    named = named.flatten(0, 1)
    given.candidates.copy_(named)
    given.in_slots.copy_(given.slot_of.gather(1, named))


def compare(given: Arguments) -> None:
    shape = *given.keys.shape[:2], given.wanted
    places, slots = (each.view(shape).long() for each in (given.candidates, given.in_slots))
    near = (slots >= 0) & (slots < given.own_slots)
    own = torch.where(near, slots, 0)
    far, here = _rows(given.keys, places), _rows(given.own_keys, own)
    keys = torch.where(near[..., None], here, far).float()
    given.logits.copy_((given.queries.float() * given.scale @ keys.mT).flatten(0, 1))


def choose(given: Arguments) -> None:
    heads, batch = given.grid
    filled = int(given.seen)
    weights = given.logits.softmax(-1).mean(1).nan_to_num()
    forced = (given.candidates < given.FIRST) | (given.candidates >= filled - given.RECENT)
    weights.masked_fill_(forced, torch.inf)
    for line in range(batch * heads):
        best = weights[line].sort(dim=0, descending=True, stable=True).indices[: given.count]
        best = best.sort().values
        held = given.in_slots[line, best]
        coming = given.candidates[line, best][held < 0]
        given.worth[line, held[held >= 0].long()] = 0
        order = given.worth[line].sort(dim=0, descending=True, stable=True).indices
        slots = order[: len(coming)].sort().values
        assert (given.worth[line, slots] > 0).all()
        given.num_fetched += len(coming)
        given.missing_of[line] = len(coming)
        given.coming[line, : len(coming)] = coming
        given.leaving[line, : len(coming)] = slots.int()


def move(given: Arguments) -> None:
    tiles, heads, batch = given.grid
    assert tiles * given.TILE >= given.room
    for line in range(batch * heads):
        at, missing = (line // heads, line % heads), int(given.missing_of[line])
        slots, places = (each[line, :missing].long() for each in (given.leaving, given.coming))
        exact = slots < given.own_slots
        own, came = slots[exact], places[exact]
        given.own_keys[at][own] = given.keys[at][came]
        given.own_values[at][own] = given.values[at][came]
        given.positions[at][own] = came.int()
        if given.rows is not None:
            behind = torch.where(slots < given.start, 0, int(given.count))
            inside = slots - given.own_slots + given.start
            given.rows[at][:, torch.where(exact, slots + behind, inside)] = 0.0


def pack(given: Arguments) -> None:
    _, heads, batch = given.grid
    for line in range(batch * heads):
        at, missing = (line // heads, line % heads), int(given.missing[line])
        slots, coming = (each[line, :missing].long() for each in (given.leaving, given.coming))
        inside = slots >= given.own_slots
        places, coming = slots[inside] - given.own_slots, coming[inside]
        for vectors, codes, scales, zeros, bits in (
            (given.keys, given.k_codes, given.k_scales, given.k_zeros, given.K_BITS),
            (given.values, given.v_codes, given.v_scales, given.v_zeros, given.V_BITS),
        ):
            own = vectors[at][coming].float()
            if vectors is given.keys:
                own = own - given.mean[at]
            turned = (own @ given.rotation).unflatten(-1, (scales.shape[2], -1))
            steps, size, least = quantized(turned, -1, bits)
            codes[at][places] = packed_codes(steps.flatten(-2), bits)
            scales[at][:, places], zeros[at][:, places] = size.mT, least.mT
        given.positions[at][places] = coming.int()


def attend_ragged(given: Arguments) -> None:
    """Every head's run of slots as one split; the others have nothing."""
    given.outs.zero_()
    given.lses.fill_(-torch.inf)
    for head, (start, last) in enumerate(zip(given.starts, given.last, strict=True)):
        own = slice(int(start), int(last) + 1)
        keys, values = given.keys[:, own].float(), given.values[:, own].float()
        logits = given.queries[:, head].float() @ keys.mT * given.scale
        if given.softcap is not None:
            logits = given.softcap * torch.tanh(logits / given.softcap)
        given.outs[:, head, 0] = logits.softmax(-1) @ values
        given.lses[:, head, 0] = logits.logsumexp(-1)
        if given.logits is not None:
            given.logits[:, :, own] = logits


def weights_of(given: Arguments) -> None:
    given.weights.zero_()
    for head, (start, last) in enumerate(zip(given.starts, given.last, strict=True)):
        own = slice(int(start), int(last) + 1)
        shares = (given.logits[:, :, own] - given.lses[:, head, :, None]).exp()
        given.weights[:, own] = shares.mean(1)


def walk(given: Arguments) -> None:
    """All queries as one split; the others have none."""
    length, entries = given.length, given.entries
    keys = given.keys.float().repeat_interleave(given.GROUP, 1)
    logits = given.queries.float() @ keys.mT * given.scale
    if given.softcap is not None:
        logits = given.softcap * torch.tanh(logits / given.softcap)
    logits -= given.lses[..., None]
    if given.CAUSAL:
        ahead = torch.ones(length, entries, dtype=torch.bool).triu(entries - length + 1)
        logits = logits.masked_fill(ahead, -torch.inf)
    given.found.fill_(-torch.inf if given.HIGHEST else 0.0)
    given.found[0] = logits.amax(2) * log2(e) if given.HIGHEST else logits.exp().sum(2)


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
    assert given.outputs == given.blocks.shape[-2] and given.stride == given.out.stride(0)
    assert given.grid[0] * given.OUTPUTS >= given.outputs
    assert given.grid[1] * given.ROWS >= given.count
    if given.chosen is not None:
        assert given.ROWS == 1 and given.count == len(given.chosen) == given.each * len(given.rows)
        given.bias = None
        _multiply_experts(given, _unpacked(given)[given.chosen], given.rows)
        return
    assert given.count == len(given.rows)
    given.out.copy_(given.rows.float() @ _unpacked(given).T)


def unpack(given: Arguments) -> None:
    given.out.copy_(_unpacked(given))


def _unpacked(given: Arguments) -> Tensor:
    return torch.from_numpy(dequantize(given.blocks.numpy(), GGMLQuantizationType(given.KIND)))


def multiply_experts(given: Arguments) -> None:
    assert given.grid[0] == len(given.chosen) == given.each * len(given.rows)
    assert (given.outputs, given.inputs) == given.weights.shape[1:]
    _multiply_experts(given, given.weights[given.chosen].float(), given.rows)


def multiply_mxfp4(given: Arguments) -> None:
    assert given.grid[0] == len(given.chosen) == given.each * len(given.rows)
    assert (given.outputs, given.groups) == given.scales.shape[1:]
    packed = given.codes[given.chosen], given.scales[given.chosen]
    matrices = convert_moe_packed_tensors(*packed, dtype=torch.float32).mT
    _multiply_experts(given, matrices, given.rows.view(given.out.dtype))


def multiply_codes(given: Arguments) -> None:
    (multiply_mxfp4 if given.levels is None else multiply_nf4)(given)


def multiply_nf4(given: Arguments) -> None:
    assert given.grid[0] == len(given.chosen) == given.each * len(given.rows)
    codes, scales = given.codes[given.chosen].int(), given.scales[given.chosen].int()
    numbers = (
        given.levels[torch.stack([codes >> 4, codes & 15], -1)].flatten(1).unflatten(1, (-1, 64))
    )
    nested = given.nested[given.chosen].repeat_interleave(256, 1)[:, : scales.shape[1]]
    sizes = given.table[scales] * nested + given.offsets[given.chosen][:, None]
    matrices = (numbers * sizes[..., None]).view(len(codes), given.outputs, 64 * given.groups)
    _multiply_experts(given, matrices, given.rows.view(given.out.dtype))


def _multiply_experts(given: Arguments, matrices: Tensor, rows: Tensor) -> None:
    made = (matrices @ rows.repeat_interleave(given.each, 0).float()[..., None])[..., 0]
    if given.bias is not None:
        made += given.bias[given.chosen].float()
    given.out.copy_(made)


TWINS: dict[str, Callable[[Arguments], None]] = {
    "triton_decode._attend_split": attend_split,
    "triton_decode.merge_splits": merge_splits,
    "triton_ragged._attend_split": attend_ragged,
    "triton_ragged._weights": weights_of,
    "triton_sums._walk": walk,
    "triton_topk._logits_of": logits_of,
    "triton_topk._averaged": averaged,
    "triton_candidates._survey": survey,
    "triton_candidates._name": name,
    "triton_recall._compare": compare,
    "triton_recall._choose": choose,
    "triton_recall._move": move,
    "triton_pack._pack": pack,
    "triton_tell._tell": tell,
    "triton_layer_ops._norm": norm,
    "triton_layer_ops._turn": turn,
    "triton_layer_ops._gate": gate,
    "triton_write._write": write,
    "triton_linear._multiply": multiply_packed,
    "triton_linear._unpack": unpack,
    "triton_experts._multiply": multiply_experts,
    "triton_experts._multiply_packed": multiply_codes,
}


def _vectors(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Quantized vectors `(batch, heads, n, dim)`, still rotated."""
    steps = unpacked_codes(codes, bits).unflatten(-1, (scales.shape[2], -1))
    return (steps * scales.mT[..., None].float() + zeros.mT[..., None].float()).flatten(-2)


def _rows(vectors: Tensor, places: Tensor) -> Tensor:
    """Some of `(batch, heads, n, dim)`."""
    return vectors.gather(2, places[..., None].expand(-1, -1, -1, vectors.shape[3]))
