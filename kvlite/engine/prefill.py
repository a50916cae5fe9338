"""Reading: all new tokens through one layer, that layer compressed, then the next layer.

Exact (the same logits as reading in one piece), and its peak is the hidden states, one layer's
keys and values, the compressed layers before it, and one chunk's activations.
"""

from collections.abc import Callable
from threading import Event

import torch
from torch import Tensor

from kvlite.attention import attend, attend_masked, grouped, merge
from kvlite.cache import Bank, KVCache, LayerCache
from kvlite.methods.base import LayerView, Method
from kvlite.methods.rules import Rule
from kvlite.methods.scores import Window, window_rows
from kvlite.model.load import LoadedModel

CHUNK = 1024
ROOM = 64

Progress = Callable[[int, int], None]


class Stopped(Exception):
    """Someone asked to stop; the cache is as it was before the reading began."""


class LayerReader:
    """Runs one layer over the new tokens chunk by chunk, keeping its keys, values and the last
    queries."""

    def __init__(self, layer: LayerCache, rule: Rule, start: int, new: int, room: int) -> None:
        """Make room in a copy of `layer` for `new` tokens from position `start`, and for `room`
        more entries where nothing will be cut."""
        method = rule.method
        lengths = [bank.used + new for bank in layer.banks]
        self.fits = max(lengths) <= rule.budget
        if self.fits:
            lengths = [line_capacity(rule, length, room) for length in lengths]
        self.layer = layer.resized(lengths, method.decode_rows if self.fits else 0)
        self.rule = rule
        self.room = room
        self.position = start
        self.end = start + new
        self.observed = max(method.observation(rule.budget), method.decode_rows)
        self.kv_heads = sum(len(bank.heads) for bank in layer.banks)
        self.queries: list[Tensor] = []
        self.answers = True
        self.scale = 1.0
        self.softcap: float | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """One chunk: over all earlier entries freely, over itself causally; nothing, and no
        meaningful result, while `answers` is off."""
        self.scale, self.softcap = scale, softcap
        length, kv_heads = q.shape[2], self.kv_heads
        after = self.end - self.position - length
        wanted = max(0, min(length, self.observed - after))
        if wanted or not after:
            self.queries.append(q[:, :, length - wanted :].clone())
        if not self.answers:
            for bank in self.layer.banks:
                bank.append(k[:, list(bank.heads)], v[:, list(bank.heads)], self.position)
            self.position += length
            return q
        outs = []
        for bank in self.layer.banks:
            whole = len(bank.heads) == kv_heads
            heads = slice(None) if whole else list(bank.heads)
            bank_q = q if whole else grouped(q, kv_heads)[:, heads].flatten(1, 2)
            before = bank.used
            bank.append(k[:, heads], v[:, heads], self.position)
            outs.append(self._over_bank(bank_q, bank, before))
        self.position += length
        if len(outs) == 1:
            return outs[0]
        order = [head for bank in self.layer.banks for head in bank.heads]
        joined = torch.cat(
            [grouped(o, len(b.heads)) for o, b in zip(outs, self.layer.banks, strict=True)], 1
        )
        return joined[:, torch.tensor(order).argsort()].flatten(1, 2)

    def _over_bank(self, q: Tensor, bank: Bank, before: int) -> Tensor:
        keys, values = bank.keys[:, :, : bank.used], bank.values[:, :, : bank.used]
        window = self.rule.window
        if window is not None and bank.used > window:
            return self._over_window(q, keys, values, before, window)
        own = attend(
            q,
            keys[:, :, before:],
            values[:, :, before:],
            scale=self.scale,
            softcap=self.softcap,
            causal=True,
        )
        if not before:
            return own[0]
        earlier = attend(
            q,
            keys[:, :, :before],
            values[:, :, :before],
            scale=self.scale,
            softcap=self.softcap,
            causal=False,
        )
        return merge(earlier, own)

    def _over_window(
        self, q: Tensor, keys: Tensor, values: Tensor, before: int, window: int
    ) -> Tensor:
        """Entry j is visible to row i of the chunk where i - window < j - before <= i: a band,
        cut into blocks of rows so that each mask is about window x window."""
        outs = []
        block = max(window, 256)
        for first in range(0, q.shape[2], block):
            rows = q[:, :, first : first + block]
            low = max(0, before + first - window + 1)
            high = before + first + rows.shape[2]
            i = torch.arange(before + first, high, device=q.device)[:, None]
            j = torch.arange(low, high, device=q.device)
            outs.append(
                attend_masked(
                    rows,
                    keys[:, :, low:high],
                    values[:, :, low:high],
                    (j <= i) & (j > i - window),
                    scale=self.scale,
                    softcap=self.softcap,
                )
            )
        return torch.cat(outs, 2)

    def observation(self) -> Window:
        """The last queries read, as many as the method wants."""
        queries = torch.cat(self.queries, 2)
        start = self.end - queries.shape[2]
        return Window(queries, start, self.kv_heads, self.scale, self.softcap)

    def compressed(self, index: int) -> LayerCache:
        """What is left of the layer, the `index`-th, once all its chunks went through."""
        window = self.observation()
        if self.fits:
            cast_first_votes(self.layer, self.rule.method, window)
            return self.layer
        view = LayerView(index, self.layer.banks, window, self.rule.budget)
        return cut(view, self.rule, self.room)


def cut(view: LayerView, rule: Rule, room: int) -> LayerCache:
    """The entries a method keeps of a layer, in storage of their own with `room` to grow."""
    selections = rule.method.select(view)
    capacities = [line_capacity(rule, s.slots.shape[2], room) for s in selections]
    layer = LayerCache.gathered(selections, capacities, rule.method.decode_rows)
    cast_first_votes(layer, rule.method, view.window)
    return layer


def cast_first_votes(layer: LayerCache, method: Method, window: Window) -> None:
    """For methods that judge entries by their last attention rows: let the last queries read be
    the first rows, over what was kept."""
    if not method.decode_rows:
        return
    for bank in layer.banks:
        for row in window_rows(bank, window.last(method.decode_rows)).unbind(2):
            bank.record(row)


@torch.inference_mode()
def prefill(
    model: LoadedModel,
    cache: KVCache,
    token_ids: Tensor,
    rules: list[Rule],
    rotations: list[tuple[Tensor, Tensor]],
    *,
    reserve: int = 0,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    stop: Event | None = None,
) -> Tensor:
    """Read `token_ids` into `cache`, compressing each layer as soon as it is done.

    Args:
        token_ids: `(batch, n)` int64, n >= 1, the tokens that follow what the cache has seen.
        rules: one a layer.
        rotations: cos and sin a layer, from the position of the first new token on.
        reserve: tokens the answer may have; lines that grow get room for up to `ROOM` of them at
            once.
        chunk: tokens that go through a layer together; any value gives the same result.
        progress: told (layer-tokens done, of how many) after every chunk.
        stop: checked before every chunk.

    Returns:
        Logits of the next token, `(batch, vocab)` float32.

    Raises:
        Stopped: `stop` was set; the cache is as it was.
    """
    cache.require_whole()
    start, n = cache.seen, token_ids.shape[1]
    hidden = model.embed(token_ids)
    done: list[LayerCache] = []
    for index, (module, rule) in enumerate(zip(model.layers, rules, strict=True)):
        reader = LayerReader(cache.layers[index], rule, start, n, min(reserve, ROOM))
        cos, sin = rotations[index]
        final = index == len(rules) - 1
        for span in _spans(n, chunk, final):
            if stop is not None and stop.is_set():
                raise Stopped
            given = {"position_embeddings": (cos[:, span], sin[:, span]), "kvlite": reader}
            reader.answers = not final or span.stop == n
            if reader.answers:
                hidden[:, span] = module(hidden[:, span], **given)
            else:
                # Nothing reads the final layer's output but the last token: it needs only keys,
                # values and queries of the others.
                module.self_attn(
                    module.input_layernorm(hidden[:, span]), attention_mask=None, **given
                )
            if progress is not None:
                progress(index * n + span.stop, len(rules) * n)
        done.append(reader.compressed(index))
    cache.layers = done
    cache.seen += n
    return model.logits(hidden[:, -1])


def _spans(n: int, chunk: int, final: bool) -> list[slice]:
    """The chunks of `n` tokens; in the final layer the last token is one by itself."""
    end = n - 1 if final else n
    spans = [slice(first, min(first + chunk, end)) for first in range(0, end, chunk)]
    return [*spans, slice(end, n)] if final else spans


def line_capacity(rule: Rule, used: int, room: int) -> int:
    """Slots for a line of `used` entries: with room to grow, up to the budget if it is bounded."""
    wanted = used + room
    return max(used, min(wanted, rule.budget)) if rule.method.bounded else wanted
