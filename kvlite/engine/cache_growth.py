"""Making room in layers for the tokens that they will read, or decode."""

from collections.abc import Sequence
from functools import partial

from kvlite.cache import KVCache, LayerCache, Selection
from kvlite.cache.layer import Mark
from kvlite.cache.segment import Write
from kvlite.memory.oom import Safely, at_once, unless_short
from kvlite.methods.layer_policy import LEAST_ROOM, ROOM, LayerPolicy
from kvlite.offload import Recall


def reserve(
    cache: KVCache,
    policies: Sequence[LayerPolicy],
    recall: Recall | None,
    count: int = 1,
    safely: Safely = at_once,
) -> None:
    """Before a step of `count` tokens: let layers grow that may, and have no room for them; let
    what takes an answer to recall from grow; quantize what is no longer recent. The step itself
    allocates no storage.

    Raises:
        OutOfMemory: nothing is left to give up; or the disk is full or fails.
    """
    for index in range(len(policies)):
        if any(head_group.room < count for head_group in cache.layers[index].head_groups):
            _grow_safely(cache, policies, index, safely)
        for number in range(len(cache.layers[index].head_groups)):
            if _lacks_slots(cache, index, number, count):
                _pack(cache, index, number, count, safely)
        if recall is not None:
            safely(partial(recall.store.make_room, index, count))


def _grow_safely(
    cache: KVCache, policies: Sequence[LayerPolicy], index: int, safely: Safely
) -> None:
    """Let a layer grow; by little, before anything is given up for more."""
    grown, device = partial(_grown, cache, policies, index), cache.layers[index].keys.device
    if not unless_short(device, partial(grown, ROOM)):
        safely(partial(grown, LEAST_ROOM))


def _grown(cache: KVCache, policies: Sequence[LayerPolicy], index: int, room: int) -> bool:
    """Give a layer more storage, if its policy lets it grow."""
    layer, policy = cache.layers[index], policies[index]
    sizes = policy.capacities(layer.lengths, room)
    capacities = [head_group.capacity for head_group in layer.head_groups]
    if any(size > capacity for size, capacity in zip(sizes, capacities, strict=True)):
        rows, bits = policy.method.decoding.rows, policy.quantize_now
        cache.layers[index] = layer.resized(sizes, rows, bits)
    return True


def _lacks_slots(cache: KVCache, index: int, number: int, count: int) -> bool:
    """Whether `count` tokens find slots in a head group only once some of it is quantized."""
    head_group = cache.layers[index].head_groups[number]
    return head_group.free < min(count, head_group.room)


def _pack(cache: KVCache, index: int, number: int, count: int, safely: Safely) -> None:
    """Quantize what is no longer recent in a head group, in place."""

    def packing() -> Write | None:
        # Looked up again each time: giving something up for memory puts another layer there.
        if _lacks_slots(cache, index, number, count):
            return cache.layers[index].head_groups[number].packing()
        return None

    write = safely(packing)
    if write is not None:
        # Entries move over others: an interrupt in between would spoil them.
        cache.writing = True
        write()
        cache.writing = False


def grows(policy: LayerPolicy, layer: LayerCache, new: int) -> bool:
    """Whether a layer will keep all that it holds and `new` tokens, as they are, and remember as
    many rows as it does: then it can grow. Any other is read into a copy, so that stopping loses
    nothing."""
    rows = policy.method.decoding.rows
    same = layer.rows == rows or not layer.entries_mean
    same &= not (layer.computed and policy.method.decoding.bounded)
    same &= policy.quantize_now is None and not layer.packed
    counted = [(heads, used + new) for heads, used in policy.counted(layer)]
    return same and policy.keeps_all(counted) and policy.method.across.resolves_at != "read"


def roomy_copy(policy: LayerPolicy, layer: LayerCache, new: int, chunk: int) -> LayerCache:
    """A copy with room for `new` tokens, or under a lambda mask for a chunk of them, with what is
    quantized written out."""
    sizes = [used + new for _, used in layer.lengths]
    if policy.mask is not None:
        sizes = [
            min(size, max(used, policy.budget) + chunk)
            for (_, used), size in zip(layer.lengths, sizes, strict=True)
        ]
        # What slides must be written out, not lie behind a segment.
        everything = [Selection.everything(head_group) for head_group in layer.head_groups]
        return LayerCache.gathered(everything, sizes, remember_packed=policy.bits is not None)
    remember_packed = policy.bits is not None and policy.partner is None
    held = policy.method.decoding.rows if policy.method.caches_scores else 0
    return layer.resized(sizes, held, remember_packed=remember_packed)


def rewound(layer: LayerCache, marks: list[Mark]) -> LayerCache:
    """A layer that grew without what it read since it was marked; in place, unless it was quantized
    in the meantime."""
    if not layer.packed:
        layer.rewind(marks)
        return layer
    kept = [
        Selection(head_group, Selection.everything(head_group).slots[:, :, : mark.used])
        for head_group, mark in zip(layer.head_groups, marks, strict=True)
    ]
    bits = next(each.packed.bits for each in layer.head_groups if each.packed is not None)
    sizes = [mark.used for mark in marks]
    before = LayerCache.gathered(kept, sizes, layer.rows, bits=bits)
    for head_group, mark in zip(before.head_groups, marks, strict=True):
        if head_group.rows is not None and mark.rows is not None:
            head_group.rows.copy_(mark.rows[..., : head_group.used])
            head_group.history_index = mark.history_index
    return before


def shrunk(layer: LayerCache, sizes: list[int], policy: LayerPolicy) -> LayerCache:
    """A layer with room for so many entries a head group, if there is memory for the copy."""
    given = sizes, policy.method.decoding.rows, policy.quantize_now
    return unless_short(layer.keys.device, partial(layer.resized, *given)) or layer
