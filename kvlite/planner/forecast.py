"""The memory that a turn will take, measured by running the engine on meta tensors.

There are no formulas to keep in step with the engine, and a new method needs none. Of layers that
are treated alike only one is run, and of a layer's chunks only the last, which see the most.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvlite.cache import KVCache, LayerCache
from kvlite.cache.quantization.hadamard import rotation
from kvlite.cache.recurrent import States
from kvlite.cache.segment import bytes_held
from kvlite.engine.layer_prefill import LayerPrefill
from kvlite.engine.prefill import CHUNK, Prefill
from kvlite.engine.slices import Slices, in_one_go
from kvlite.engine.step import StepRows, through_layer
from kvlite.errors import ForecastError, KvliteError, reason
from kvlite.methods.layer_policy import LayerPolicy, merge_below, share_out
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore, Recall
from kvlite.planner.meta import MetaMeter
from kvlite.planner.meta_cache import MetaOpCache
from kvlite.planner.peaks import Forecast, Moment

# First turns that a model remembers.
REMEMBERED = 64


@dataclass(frozen=True)
class Task:
    """What to read and answer.

    Attributes:
        new: tokens to read.
        longest: tokens of the answer that memory is planned for.
        known: tokens read before, which a method may have the model repeat.
        chunk: tokens that go through a layer together.
        recalled: entries that each token of the answer may fetch back.
    """

    new: int
    longest: int
    known: int = 0
    chunk: int = CHUNK
    recalled: int = 0


@dataclass(frozen=True)
class _Took:
    """What one layer took, over what was live before it.

    Attributes:
        reading, choosing: peaks.
        whole: bytes of its entries while it was read.
        kept, host: what it leaves, on the device and in host memory.
        layer, policy: what was kept, and by which policy.
        indexed: whether an index replaced another, which is freed once all is read.
        states: what the recurrent layers that run with it keep.
    """

    reading: int
    choosing: int
    whole: int
    kept: int
    host: int
    layer: LayerCache
    policy: LayerPolicy
    indexed: bool
    states: States


class _Foresight(Prefill):
    """Reads only the last chunks of a layer, as if it had read the others."""

    def __init__(self, meter: MetaMeter, *given: Any, **options: Any) -> None:
        self.meter = meter
        self.passed = 0
        self.roomy = 0
        super().__init__(*given, **options)

    def take(self, index: int) -> _Took:
        """Read and cut one layer."""
        live, host, self.meter.peak = self.meter.live, self.meter.host, self.meter.live
        before = self._index(index)
        layer = in_one_go(self.compressed(index))
        return _Took(
            reading=self.passed - live,
            choosing=self.meter.peak - live,
            whole=self.roomy,
            kept=self.meter.live - live,
            host=self.meter.host - host,
            layer=layer,
            policy=self.policies[index],
            indexed=before is not None and self._index(index) is not before,
            states=self.states.get(index, {}),
        )

    def _index(self, index: int) -> Any:
        made = None if self.store is None else self.store.layers[index].index
        return None if made is None else made.signs

    def read_layer(self, index: int) -> Slices[LayerPrefill]:
        """As `Prefill`; then the meter's peak begins anew."""
        layer_prefill = yield from super().read_layer(index)
        self.passed, self.meter.peak = self.meter.peak, self.meter.live
        return layer_prefill

    def _begin(self, index: int) -> int:
        """The start of the last full chunk, or of the first whose queries the method wants; where
        states are carried on, one chunk earlier."""
        policy = self.policies[index]
        length: int = self.hidden.shape[1]
        end = length - 1 if self._is_final(index) else length
        starts: list[int] = [*range(0, end, self.chunk), *([end] if self._is_final(index) else [])]
        observed = length - max(policy.method.needs.num_queries(policy.budget), 1)
        seen = sum(at + self.chunk > observed for at in starts)
        carried = bool(self.model.shape.states[index])
        more = self._is_final(index) + carried
        return starts[-min(max(2 + more, seen), len(starts))]

    def _roomy(self, index: int) -> LayerCache:
        layer = super()._roomy(index)
        self.roomy = layer.nbytes
        for head_group in layer.head_groups:  # under a mask it is full from then on
            head_group.used = min(head_group.used + self._begin(index), head_group.capacity)
        return layer


def forecast(
    model: LoadedModel,
    cache: KVCache,
    policies: Sequence[LayerPolicy],
    task: Task,
    store: HostKVStore | None = None,
    op_cache: MetaOpCache | None = None,
) -> Forecast:
    """What a turn will take, in bytes of live tensors. Of a conversation's first turn that is known
    if the same model was asked before, as when it was loaded.

    Args:
        model: on the meta device (`model.meta`).
        cache: the cache before the turn, as meta tensors; consumed.
        policies: one per layer.
        store: the host store, as meta tensors, if there is one.
        op_cache: of earlier forecasts; makes this one faster.

    Raises:
        ForecastError: something does not run on meta tensors.
    """
    if cache.seen or (store is not None and store.begun):
        return _measured(model, cache, policies, task, store, op_cache)
    stored = None if store is None else (store.bits, store.spare)
    batch = cache.layers[0].keys.shape[0]
    held = bytes_held(cache.tensors), tuple(cache.queries)
    key = task, tuple(policies), stored, batch, held
    if key not in model.forecasts:
        if len(model.forecasts) >= REMEMBERED:
            model.forecasts.clear()
        made = _measured(model, cache, policies, task, store, op_cache)
        model.forecasts[key] = made
    found: Forecast = model.forecasts[key]
    return found


@torch.inference_mode()
def _measured(
    model: LoadedModel,
    cache: KVCache,
    policies: Sequence[LayerPolicy],
    task: Task,
    store: HostKVStore | None,
    op_cache: MetaOpCache | None,
) -> Forecast:
    index, aside = (store.index_tensors, store.tensors) if store else ([], [])
    held = [*model.tensors(), *cache.tensors, *index]
    meter = MetaMeter(held, host=aside, op_cache=op_cache or MetaOpCache())
    meter.live -= bytes_held(model.tensors())
    del held, index, aside  # or the meter would not see them freed
    for dim in {size.dim for size in model.shape.kv_sizes}:
        rotation(dim, model.device)  # made once in a process, not by each layer
    try:
        with meter:
            return _forecast(meter, model, cache, [*policies], task, store)
    except KvliteError:
        raise
    except Exception as error:  # from torch, or a model that needs data
        raise ForecastError(f"no plan can be made: {reason(error)}") from error


def _forecast(
    meter: MetaMeter,
    model: LoadedModel,
    cache: KVCache,
    policies: list[LayerPolicy],
    task: Task,
    store: HostKVStore | None,
) -> Forecast:
    batch, device = cache.layers[0].keys.shape[0], model.device
    held = meter.peak = meter.live
    ids = torch.empty(batch, task.new, dtype=torch.int64, device=device)
    context = torch.empty(batch, task.known, dtype=torch.int64, device=device)
    reading = _Foresight(
        meter,
        model,
        cache,
        ids,
        policies,
        reserve=task.longest,
        chunk=task.chunk,
        context=context,
        store=store,
    )
    beside = meter.live - held - reading.hidden.nbytes
    read, chosen = Moment(held, meter.peak - held), Moment()
    known: dict[Any, _Took] = {}
    layers: list[LayerCache] = []
    indexes: list[int] = []
    outdated: list[int] = []
    for index in range(len(policies)):
        hidden = beside + reading.hidden.nbytes
        kv, key = meter.live - hidden, _kind(reading, index)
        took = known.get(key)
        if took is None:
            took = reading.take(index)
            if (
                reading.policies[index].candidate_budget is None
                and reading.policies[index].partner is None
            ):
                known[key] = took
        else:
            meter.live, meter.host = meter.live + took.kept, meter.host + took.host
            if took.indexed:
                outdated.append(index)
            reading.policies[index] = took.policy
            reading.states |= {index: took.states} if took.states else {}
        read = read.higher(Moment.over(kv, hidden, took.whole, took.reading))
        chosen = chosen.higher(Moment.over(kv, hidden, took.whole, took.choosing))
        layers.append(took.layer)
        indexes.append(max(0, took.kept - took.layer.nbytes))
        del took
        meter.peak, before = meter.live, meter.live
        merge_below(layers, policies, index, reading.room)
        chosen = chosen.higher(Moment.over(before - hidden, hidden, 0, meter.peak - before))
    hidden, before = beside + reading.hidden.nbytes, meter.live
    share_out(layers, policies, reading.room)
    chosen = chosen.higher(Moment.over(before - hidden, hidden, 0, meter.peak - before))
    meter.peak = meter.live
    logits = reading.logits()
    last = Moment(meter.live - hidden - logits.nbytes, hidden, 0, meter.peak - meter.live)
    read = read.higher(replace(last, work=last.work + logits.nbytes))
    cache.layers, cache.seen, cache.states = layers, reading.end, reading.states
    if store is not None:
        store.carry(reading.states)
        store.read(reading.end)
        for index in outdated:
            store.layers[index].index = None
    known.clear()
    del reading, ids, context, logits, layers
    answering = _answer(meter, model, cache, policies, task, store)
    by_layer = zip(cache.layers, indexes, strict=True)
    grown = tuple(layer.nbytes + index for layer, index in by_layer)
    return Forecast(read, chosen, answering, last.kv, meter.host, grown)


def _answer(
    meter: MetaMeter,
    model: LoadedModel,
    cache: KVCache,
    policies: list[LayerPolicy],
    task: Task,
    store: HostKVStore | None,
) -> Moment:
    """The last token of the longest answer, when all lines have grown as far as they can."""
    if not task.longest:
        return Moment(meter.live)
    recall = Recall(store, task.recalled) if store is not None else None
    first = reversed([*enumerate(cache.layers)])
    alike = {id(layer): index for index, layer in first}
    counts = Counter(id(layer) for layer in cache.layers)
    growing = 0
    for key, index in alike.items():
        layer = cache.layers[index]
        grown = _grown(layer, policies[index], task.longest)
        if grown is not layer:
            growing = max(growing, layer.nbytes)
        meter.live += (counts[key] - 1) * (grown.nbytes - layer.nbytes)
        cache.layers = [grown if id(each) == key else each for each in cache.layers]
        del layer
    kv = meter.live
    cache.seen += task.longest - 1
    ids = torch.zeros(cache.layers[0].keys.shape[0], 1, dtype=torch.int64)
    rows = StepRows(model, cache, ids, policies, recall)
    rows.begin()
    hidden = model.embed(ids)
    tables = meter.live - kv
    meter.peak = meter.live
    for index in alike.values():
        for lender in model.shape.lenders:
            if lender < index:
                rows.layer(lender)
        through_layer(model, [rows], index, hidden)
        rows.layers.pop(index).trimmed()
    model.logits(hidden[:, -1])
    stepping = Moment(kv, tables, 0, meter.peak - kv - tables)
    return stepping.higher(Moment(kv, tables, growing))


def _grown(layer: LayerCache, policy: LayerPolicy, longest: int) -> LayerCache:
    """A layer before the last token of an answer."""
    sizes = held = [head_group.capacity for head_group in layer.head_groups]
    wanted = [head_group.used + longest - 1 for head_group in layer.head_groups]
    if policy.chunk is not None:
        wanted = [min(entries, policy.budget) for entries in wanted]
    while any(size < want for size, want in zip(sizes, wanted, strict=True)):
        full = [
            (len(head_group.heads), size)
            for head_group, size in zip(layer.head_groups, sizes, strict=True)
        ]
        more = policy.capacities(full)
        if all(new <= size for new, size in zip(more, sizes, strict=True)):
            break  # from here on tokens overwrite others
        sizes = [max(pair) for pair in zip(more, sizes, strict=True)]
    rows, bits = policy.method.decoding.rows, policy.quantize_now
    if sizes != held and layer.computed:
        layer = layer.resized(sizes, rows, bits)
    elif sizes != held:
        layer = layer.empty_like(sizes, decode_rows=0 if bits else rows)
        _fill(layer, wanted)
        layer = layer.resized(sizes, rows, bits) if bits else layer
    _fill(layer, wanted)
    return layer


def _fill(layer: LayerCache, wanted: Sequence[int]) -> None:
    for head_group, entries in zip(layer.head_groups, wanted, strict=True):
        head_group.fill(min(entries, head_group.capacity))


def _kind(reading: _Foresight, index: int) -> Any:
    """A key for layers that take the same."""
    held, store = reading.cache.layers[index], reading.store
    aside = None if store is None else store.layers[index]
    return (
        reading.model.shape.alike[index],
        index in reading.model.shape.lenders,
        reading.policies[index],
        reading.policies[index + 1].token_budget if index + 1 < len(reading.policies) else "final",
        reading.hidden.shape[1],
        tuple(held.lengths),
        held.nbytes,
        index in reading.cache.queries,
        None if aside is None else (aside.window, aside.read, aside.cache.nbytes, aside.scored_by),
    )
