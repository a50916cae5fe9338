"""Checkpoints: how a cache was, so that a conversation can return there without reading again.

A layer that holds everything it was given, in order, can be cut back: its length is enough. One
that will drop or overwrite entries is copied to host memory. A host store that has everything only
needs its length as well, and gives back what the cache has lost since. The states of recurrent
layers are always copied.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvlite.cache import KVCache, LayerCache
from kvlite.cache.copying import copied
from kvlite.cache.cut import cut, edge, first
from kvlite.cache.layer import Mark
from kvlite.cache.recurrent import States, copies_of, state_tensors
from kvlite.cache.segment import bytes_held
from kvlite.memory.meter import aside
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore
from kvlite.offload.kv.checkpoint import HostKVCheckpoint
from kvlite.offload.kv.store import HOST


@dataclass
class LayerState:
    """How a layer was: its length (`mark`), or a `copy` in host memory once neither the cache nor
    a host store has everything."""

    mark: Mark | None = None
    copy: LayerCache | None = None


@dataclass
class Checkpoint:
    """How a cache and its host store were, at the beginning of a message or anywhere else; by
    default before anything was read. A message and those that replaced it have the same one.

    Attributes:
        seen, reconstructed: of the cache.
        pending_ids, notes: of the context.
        number: user messages before it.
        prefilled_ids: tokens of the message that were read before it was said.
        prefill_start: where those begin.
        layers: one a layer of the cache; none where the host store gives them back.
        store: how it was, if it had begun.
        lost: whether it was freed, so that its tokens have to be read again.
        states: of recurrent layers, which can't be cut back: copies in host memory.
    """

    seen: int = 0
    pending_ids: list[int] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    reconstructed: int = 0
    number: int = 0
    prefilled_ids: list[int] = field(default_factory=list)
    prefill_start: "Checkpoint | None" = None
    layers: list[LayerState] = field(default_factory=list)
    store: HostKVCheckpoint | None = None
    lost: bool = False
    states: dict[int, States] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether it is a complete copy, which needs neither the cache nor the host store."""
        copied = bool(self.layers) and all(each.copy is not None for each in self.layers)
        return copied and self.store is None

    @property
    def copies(self) -> list[LayerCache]:
        """Its copied layers, which checkpoints may share."""
        return [each.copy for each in self.layers if each.copy is not None]

    def release_memory(self) -> None:
        """Free what it holds."""
        self.layers, self.store, self.lost, self.states = [], None, True, {}


@torch.inference_mode()
def capture(
    made: Checkpoint, model: LoadedModel, cache: KVCache, store: HostKVStore | None, most: int
) -> None:
    """Let a checkpoint that is `lost` hold the cache or, if it has begun, the host store: the next
    turn reads from there. It stays lost if it would take more than `most` bytes.
    """
    with aside():
        if store is not None and store.begun:
            held = HostKVCheckpoint(store)
            if held.nbytes <= most:
                made.store, made.lost = held, False
            return
        full = model.shape.full_layers
        stay = [
            index in full and whole(layer, cache.seen) for index, layer in enumerate(cache.layers)
        ]
        others = [layer for layer, stays in zip(cache.layers, stay, strict=True) if not stays]
        if _bytes_in(others) + cache.state_bytes > most:
            return
        made.states = copies_of(cache.states, lambda _: HOST)
        copies = iter(copied(others, [HOST] * len(others)))
        made.layers = [
            LayerState(mark=layer.mark()[0]) if stays else LayerState(copy=next(copies))
            for layer, stays in zip(cache.layers, stay, strict=True)
        ]
        made.lost = False


def bytes_of(checkpoints: Iterable[Checkpoint]) -> int:
    """Bytes of host memory that checkpoints take; shared copies count once."""
    copies = {id(layer): layer for each in checkpoints for layer in each.copies}
    marks = sum(each.store.nbytes for each in checkpoints if each.store is not None)
    states = sum(bytes_held(state_tensors(each.states)) for each in checkpoints)
    return _bytes_in(copies.values()) + marks + states


@torch.inference_mode()
def copy_out(checkpoints: Iterable[Checkpoint], cache: KVCache, most: int) -> None:
    """Copy what checkpoints need of a cache that is about to lose entries; free them instead if
    that takes more than `most` bytes."""
    lacking = [
        (each, index, state)
        for each in checkpoints
        for index, state in enumerate(each.layers)
        if state.copy is None
        and state.mark is not None
        and whole(cache.layers[index], state.mark.used)
    ]
    layers = {index: cache.layers[index] for _, index, _ in lacking}
    if _bytes_in(layers.values()) > most:
        for each, _, _ in lacking:
            each.release_memory()
        return
    with aside():
        copies = copied([*layers.values()], [HOST] * len(layers))
        made = dict(zip(layers, copies, strict=True))
    for _, index, state in lacking:
        state.copy = made[index]


@torch.inference_mode()
def restored(
    model: LoadedModel,
    made: Checkpoint,
    cache: KVCache,
    store: HostKVStore | None,
    *,
    as_copy: bool = False,
) -> KVCache | None:
    """The cache as it was at a checkpoint; None if nothing holds what that takes. `cache` and
    `store` may be changed, but not if memory runs out, nor `as_copy`, which is of a checkpoint that
    needs no host store."""
    if made.lost or (made.store is not None and not made.store.fits(store)):
        return None
    before = KVCache(model.empty_cache().layers, made.seen, made.reconstructed)
    if made.store is not None:
        assert store is not None
        made.store.put_back(store)
        return before
    if not made.layers:
        return before  # the beginning
    givers = [_giver(index, state, cache, store) for index, state in enumerate(made.layers)]
    if None in givers:
        return None
    before.states = copies_of(made.states, model.device_of)
    homes = zip(model.devices, made.layers, strict=True)
    copies = iter(copied(made.copies, [device for device, each in homes if each.copy is not None]))
    apart = dict[int, LayerCache]()
    for index, (state, giver) in enumerate(zip(made.layers, givers, strict=True)):
        if state.mark is None or giver == "copy":
            before.layers[index] = next(copies)
        elif giver == "cache":
            live = cache.layers[index]
            if as_copy and id(live) not in apart:
                apart[id(live)] = first(live, state.mark.used)
            before.layers[index] = apart.get(id(live), live)
        elif store is not None:
            mark, device = state.mark, model.devices[index]
            before.layers[index] = store.restored(index, 0, device, read=mark.used)
            if mark.rows is not None:
                before.layers[index] = before.layers[index].resized([mark.used], mark.rows.shape[2])
    # All that has to be allocated is.
    for layer, state in zip(before.layers, made.layers, strict=True):
        if state.mark is not None:
            cut(layer, state.mark.used)
            layer.rewind([state.mark])
    return before


@torch.inference_mode()
def everything(model: LoadedModel, cache: KVCache, store: HostKVStore) -> KVCache:
    """A cache with everything in a host store, for a turn that does not recall."""
    layers = [store.restored(index, 0, device) for index, device in enumerate(model.devices)]
    states = copies_of(store.states, model.device_of)
    return KVCache(layers, store.seen, cache.reconstructed, states=states)


def _bytes_in(layers: Iterable[LayerCache]) -> int:
    return bytes_held(tensor for layer in layers for tensor in layer.tensors)


def _giver(
    index: int, state: LayerState, cache: KVCache, store: HostKVStore | None
) -> Literal["copy", "cache", "store"] | None:
    mark, live = state.mark, cache.layers[index]
    if state.copy is not None or mark is None:
        return "copy"
    if edge(live, mark.used) == mark.used and (live.rows > 0) == (mark.rows is not None):
        return "cache"
    source = None if store is None else store.layers[index]
    if source is None or source.read < mark.used or source.head_group.segment is not None:
        return None
    return "store"


def whole(layer: LayerCache, count: int) -> bool:
    """Whether a layer holds at least the first `count` entries, in order and unquantized."""
    return not layer.packed and edge(layer, count) == count
