"""Attention without n x n masks: blocks that return their log-sum-exp, and how to merge them.

Every function takes unrepeated KV heads: queries `(batch, heads, L, dim)`, keys and values
`(batch, kv heads, N, dim)`, query head h reading KV head h // (heads / kv heads).
What returns a log-sum-exp leaves a softmax's sinks out: `Softmax.with_sinks` puts them in once all
parts are merged. What returns attention alone has them in it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.ops.device import has_triton
from kvlite.ops.softmax import Softmax

ROW_BLOCK = 256
ELEMENTS_AT_ONCE = 1 << 22


def attend(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of L queries over N entries, and its log-sum-exp.

    Args:
        q, k, v: as in the module's header. With `causal`, L == N and row i sees entries 0..i.

    Returns:
        output `(batch, heads, L, dim)` in the queries' dtype and natural-log lse
        `(batch, heads, L)` float32.
    """
    if softmax.softcap is not None or q.device.type not in ("cpu", "cuda", "meta"):
        return _plain(q, k, v, softmax, causal)
    if _takes_bfloat16(q, softmax):
        return _in_bfloat16(q, k, v, softmax.scale, causal)
    if q.is_cpu or (q.is_meta and q.dtype == torch.float32):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, v, 0.0, causal, scale=softmax.scale)
        return out, lse
    return _on_cuda(q, k, v, softmax.scale, causal)


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of entries from attention over each, as `attend` returns
    it."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    share = torch.sigmoid(lse_a - lse_b)[..., None]
    out = torch.lerp(out_b.float(), out_a.float(), share).to(out_a.dtype)
    return out, torch.logaddexp(lse_a, lse_b)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attention of the last L of N entries, each over itself and all before it, as `attend` returns
    it."""
    if q.shape[2] == 1:
        return attend(q, k, v, softmax, causal=False)
    if _takes_bfloat16(q, softmax):
        return _in_bfloat16(q, k, v, softmax.scale, True)
    before = k.shape[2] - q.shape[2]
    own = attend(q, k[:, :, before:], v[:, :, before:], softmax, causal=True)
    if not before:
        return own
    earlier = attend(q, k[:, :, :before], v[:, :, :before], softmax, causal=False)
    return merged(earlier, own)


def attend_band(
    q: Tensor, k: Tensor, v: Tensor, width: int, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Attention of the last L of N entries, each over the `width` entries that end with itself, or
    all where there are not as many.

    Blocks of rows, each at most one triangle of their own entries, a rectangle of those that all
    of them see, and a triangle of those that leave their sight one after the other; that one is
    causal seen from its far end. So no mask is needed, and no entry out of sight is looked at.

    Returns:
        as `attend`.
    """
    before = k.shape[2] - q.shape[2]
    growing = min(max(0, width - before), q.shape[2])
    parts = []
    if growing:
        rows, seen = q[:, :, :growing], slice(before + growing)
        parts.append(attend_causal(rows, k[:, :, seen], v[:, :, seen], softmax))
    block = max(1, width - 1)
    for first in range(growing, q.shape[2], block):
        rows = q[:, :, first : first + block]
        start, end = before + first, before + first + rows.shape[2]
        seen = slice(min(start, end - width + 1), end)
        part = attend_causal(rows, k[:, :, seen], v[:, :, seen], softmax)
        if width > 1:
            leaving = slice(start - width + 1, seen.start)
            given = rows, k[:, :, leaving], v[:, :, leaving]
            back, keys, values = (each.flip(2) for each in given)
            out, lse = attend(back, keys, values, softmax, causal=True)
            part = merged((out.flip(2), lse.flip(2)), part)
        parts.append(part)
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softmax: Softmax) -> Tensor:
    """Attention under a boolean mask `(L, N)`, True where entry j is visible to row i."""
    if softmax.softcap is not None or softmax.sinks is not None:
        logits = scaled_logits(q, k, softmax).masked_fill_(~mask, -torch.inf)
        return _weigh(softmax.probabilities(logits), v, q)
    if q.device.type == "cuda":
        # With a mask, CUDA's fast kernels take only as many KV heads as query heads.
        q, k, v = _equal_heads(q, k, v, causal=True)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=softmax.scale, enable_gqa=k.shape[1] != q.shape[1]
    )


def attend_with_rows(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Decode attention that also says where it looked. Returns output `(batch, heads, L, dim)` and
    the probabilities averaged over a KV head's queries, `(batch, kv heads, L, N)` float32."""
    probabilities = softmax.probabilities(scaled_logits(q, k, softmax))
    return _weigh(probabilities, v, q), probabilities.mean(2)


def attend_ragged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    last: Tensor,
    longest: int,
    softmax: Softmax,
    weights: Tensor | None = None,
) -> Tensor:
    """Attention of one token over flat storage, in which each KV head has a run of slots.

    What runs depends on shapes alone and nothing is read back, so a CUDA graph can hold it.

    Args:
        q: `(batch, kv heads, heads per KV head, dim)`.
        keys, values: `(batch, slots, dim)`; what is not filled may be anything.
        starts, last: `(kv heads,)` int64, the first slot of each KV head and its last filled one.
        longest: slots of the longest run. Runs lie one behind the other.
        weights: `(batch, slots)` float32, into which go the probabilities averaged over a KV head's
            queries, 0 for what is not filled; None if nobody wants them.

    Returns:
        output in the shape and dtype of q.
    """
    if has_triton(q.device, q.shape[3]):
        # torch brings triton along on CUDA alone.
        from kvlite.ops import triton_ragged

        runs = starts, last, longest
        return triton_ragged.attend_ragged(q, keys, values, *runs, softmax, weights)
    slots = starts[:, None] + torch.arange(longest, device=q.device)
    held = slots <= last[:, None]
    slots = torch.minimum(slots, last[:, None])
    own = keys[:, slots]
    logits = softmax.capped((q.float() * softmax.scale) @ own.float().mT)
    shares = softmax.probabilities(logits.masked_fill(~held[:, None], -torch.inf))
    if weights is not None:
        weights.zero_().scatter_add_(
            1, slots.view(1, -1).expand(len(q), -1), shares.mean(2).flatten(1)
        )
    own = own if values is keys else values[:, slots]
    return (shares.to(own.dtype) @ own).to(q.dtype)


def attention_sums(q: Tensor, k: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    """How much attention L queries paid to each of N entries, the last L of which are their own:
    probabilities summed over queries, averaged over a KV head's query heads, `(batch, kv heads, N)`
    float32. Formed anew from the lse `(batch, heads, L)` that `attend` returned, in blocks of rows;
    on CUDA in tiles."""
    if softmax.in_tiles:
        by_head = attention_of(q, k, lse, softmax, causal=True, highest=False)
        return grouped(by_head, k.shape[1]).mean(2)
    (batch, heads, length, _), (kv_heads, entries) = q.shape, k.shape[1:3]
    sums = torch.zeros(batch, kv_heads, entries, device=q.device)
    block = max(1, ELEMENTS_AT_ONCE // (batch * heads * entries))
    columns = torch.arange(entries, device=q.device)
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        stop = entries - length + rows.stop
        first = stop - (rows.stop - rows.start)
        logits = scaled_logits(q[:, :, rows], k[:, :, :stop], softmax)
        own = columns[first:stop]
        logits[..., first:].masked_fill_(own > own[:, None], -torch.inf)
        weights = (logits - grouped(lse[:, :, rows, None], kv_heads)).exp_()
        sums[..., :stop] += weights.sum(3).mean(2)
    return sums


def attention_peaks(q: Tensor, k: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    """The most attention that any of L queries paid to each of N entries: the highest probability
    of any row and any query head of a KV head, `(batch, kv heads, N)` float32. Formed like
    `attention_sums`."""
    if softmax.in_tiles:
        by_head = attention_of(q, k, lse, softmax, causal=False, highest=True)
        return grouped(by_head, k.shape[1]).amax(2)
    (batch, heads, length, _), (kv_heads, entries) = q.shape, k.shape[1:3]
    peaks = torch.full((batch, kv_heads, entries), -torch.inf, device=q.device)
    block = max(1, ELEMENTS_AT_ONCE // (batch * heads * entries))
    for start in range(0, length, block):
        rows = slice(start, start + block)
        logits = scaled_logits(q[:, :, rows], k, softmax)
        logits -= grouped(lse[:, :, rows, None], kv_heads)
        torch.maximum(peaks, logits.flatten(2, 3).amax(2), out=peaks)
    return peaks.exp_()


def attention_of(
    q: Tensor, k: Tensor, lse: Tensor, softmax: Softmax, *, causal: bool, highest: bool
) -> Tensor:
    """What each of N entries got of L queries' attention, by a kernel: `(batch, heads, N)` float32,
    the `highest` probability or their sum. If `causal`, the last L entries are the queries' own,
    else they see all; `lse` `(batch, heads, L)` is over all they looked at."""
    if q.is_meta:  # takes what the kernel does where its programs keep every processor busy
        found = q.new_empty(1, *q.shape[:2], k.shape[2], dtype=torch.float32)
        return found.amax(0) if highest else found[0]
    from kvlite.ops import triton_sums

    return triton_sums.attention_of(q, k, lse, softmax, causal=causal, highest=highest)


def causal_lse(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Log-sum-exp `(batch, heads, L)` of the last L of N entries, each over itself and all before
    it, in blocks of rows; of meta tensors the last two, which take most."""
    batch, heads, length, dim = q.shape
    block = max(1, ELEMENTS_AT_ONCE // (2 * batch * heads * dim))
    starts = range(0, length, block)
    skipped = starts[-2:][0] if q.is_meta else 0
    before, parts = k.shape[2] - length + skipped, []
    if skipped:
        parts.append(q.new_empty(batch, heads, skipped, dtype=torch.float32))
    for rows in q[:, :, skipped:].split(block, 2):
        seen = k[:, :, : before + rows.shape[2]]
        parts.append(softmax.with_sinks(*attend_causal(rows, seen, seen, softmax))[1])
        before += rows.shape[2]
    return torch.cat(parts, 2)


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """View queries `(batch, heads, L, dim)` as `(batch, kv heads, heads per KV head, L, dim)`."""
    return q.view(q.shape[0], kv_heads, q.shape[1] // kv_heads, *q.shape[2:])


def scaled_logits(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Logits `(batch, kv heads, group, L, N)` float32, from float32 products: a product in
    float16 may overflow before it is scaled."""
    group = grouped(q, k.shape[1]).float() * softmax.scale
    flat = group.flatten(2, 3)
    logits = softmax.capped(torch.matmul(flat, k.float().transpose(-1, -2)))
    return logits.view(*group.shape[:4], -1)


def _weigh(probabilities: Tensor, v: Tensor, q: Tensor) -> Tensor:
    out = torch.matmul(probabilities.flatten(2, 3).to(v.dtype), v)
    return out.view(*q.shape[:1], v.shape[1], -1, q.shape[2], v.shape[3]).flatten(1, 2).to(q.dtype)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, causal: bool
) -> tuple[Tensor, Tensor]:
    """Any device, any dtype, soft caps: row blocks in plain torch. The others' reference."""
    outs, lses = [], []
    columns = torch.arange(k.shape[2], device=q.device)
    for start in range(0, q.shape[2], ROW_BLOCK):
        rows = q[:, :, start : start + ROW_BLOCK]
        stop = start + rows.shape[2] if causal else k.shape[2]
        logits = scaled_logits(rows, k[:, :, :stop], softmax)
        if causal:
            index = torch.arange(start, stop, device=q.device)
            logits.masked_fill_(columns[:stop] > index[:, None], -torch.inf)
        lse = logits.logsumexp(-1)
        outs.append(_weigh((logits - lse[..., None]).exp_(), v[:, :, :stop], rows))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _takes_bfloat16(q: Tensor, softmax: Softmax) -> bool:
    """Whether queries are multiplied in bfloat16, on a CPU or in a plan for one."""
    return (
        softmax.in_bfloat16
        and softmax.softcap is None
        and q.dtype == torch.float32
        and not q.is_cuda
    )


def _in_bfloat16(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    if not q.is_meta:
        from kvlite.ops.numba_flash import attend

        attend(q, k, v, scale, causal, out, lse)
    return out, lse


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Of meta tensors only memory is asked for: as on a device that computes with their type."""
    given, aten = _equal_heads(q, k, v, causal), torch.ops.aten
    if q.is_meta or _flash_takes(q):
        made = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=scale)
    else:
        efficient = aten._scaled_dot_product_efficient_attention
        made = efficient(*given, None, True, 0.0, causal, scale=scale)
    out, lse = made[:2]
    return out.reshape(q.shape), lse[..., : given[0].shape[2]].reshape(q.shape[:3])


def _flash_takes(q: Tensor) -> bool:
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _equal_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As many KV heads as query heads: a causal block repeats its own (short) keys and values,
    else a KV head's queries become rows of one head, and nothing is repeated."""
    group = q.shape[1] // k.shape[1]
    if causal:
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return grouped(q, k.shape[1]).flatten(2, 3), k, v
