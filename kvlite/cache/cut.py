"""Layers cut back to the first entries that they were given, in place or as copies."""

import torch

from kvlite.cache.layer import LayerCache


def edge(layer: LayerCache, most: int) -> int | None:
    """The last place where a layer can be cut that leaves `most` entries or fewer: any, unless
    neighbors are quantized together. None if it does not hold its first entries in order."""
    if not layer.uniform or layer.computed:
        return None
    (held,) = layer.head_groups
    if held.used < most:
        return None
    positions = held.positions[:, :, :most]
    order = torch.arange(most, dtype=torch.int32, device=positions.device)
    if not bool((positions == order).all()):
        return None
    packed = held.packed
    if packed is None or not packed.start < most < packed.start + packed.count:
        return most
    return most - (most - packed.start) % packed.bits.together


def cut(layer: LayerCache, count: int) -> None:
    """Drop all but the first `count` entries, which end at an `edge`."""
    (held,) = layer.head_groups
    packed = held.packed
    if packed is not None and count < packed.start + packed.count:
        left = count - packed.start
        held.segment = (packed.storage or packed).first(left) if left > 0 else None
    held.used = count


def first(layer: LayerCache, count: int) -> LayerCache:
    """A copy of the first `count` entries, which end at an `edge`, without room for more."""
    (held,) = layer.head_groups
    packed = held.packed
    if packed is not None:
        left = min(packed.count, count - packed.start)
        packed = packed.first(left).with_room(0) if left > 0 else None
    made = layer.empty_like([count], decode_rows=layer.rows, segments=[packed])
    (own,) = made.head_groups
    own.copy_first(held, count - own.segment_len)
    own.used = count
    return made
