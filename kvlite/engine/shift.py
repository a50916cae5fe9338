"""Context shift: entries move together, so that a conversation can exceed the trained context.

The entries in the cache get the first positions: keys are rotated as if nothing else had ever been
read. Source of the positions: "Efficient Streaming Language Models with
Attention Sinks", section 3.2 (positions within the cache, not of the text).
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvlite.cache import KVCache, KVHeadGroup, LayerCache, Selection
from kvlite.engine.oom_actions import SINKS, kept
from kvlite.errors import SettingError
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation, turned, unturnable


@torch.inference_mode()
def compacted(model: LoadedModel, cache: KVCache, most: int) -> KVCache:
    """A cache that has seen as many tokens as the longest of its lines holds entries.

    The first few entries of a line stay first, the others end where the longest line does, each
    line without gaps. What is quantized is written out; states of recurrent layers stay as they
    are.

    Args:
        most: entries a KV head may hold; of a longer line those stay that got most attention, if
            that is remembered, the first few and the most recent ones.

    Raises:
        SettingError: the model's rotations cannot be undone.
    """
    if why := unturnable(model):
        raise SettingError(
            f"--beyond-context compact turns keys to other positions, but {why}: use refuse"
        )
    chosen = [
        [kept(head_group, most) for head_group in layer.head_groups] for layer in cache.layers
    ]
    seen = max(each.length[1] for selections in chosen for each in selections)
    for index, window in enumerate(model.shape.windows):
        if window is not None:
            chosen[index] = [_last(each, window.entries(seen)) for each in chosen[index]]
    tables = model.rotations_at(torch.arange(cache.seen, device=model.device), torch.float32)
    layers = []
    for layer, selections, table in zip(cache.layers, chosen, tables, strict=True):
        sizes = [each.length[1] for each in selections]
        made = LayerCache.gathered(selections, sizes, layer.rows)
        for head_group in made.head_groups:
            _move(head_group, table, seen)
        layers.append(made)
    return KVCache(layers, seen, states=cache.states)


def _last(selection: Selection, count: int) -> Selection:
    """At most the last `count` entries of a selection."""
    kept = selection.slots.shape[2]
    return replace(selection, slots=selection.slots[:, :, max(0, kept - count) :])


def _move(head_group: KVHeadGroup, table: Rotation, seen: int) -> None:
    """Give a head group's entries, ascending in position, their new ones."""
    count, before = head_group.used, head_group.residual_positions[:, :, : head_group.used].long()
    first = before < SINKS
    late = torch.arange(seen - count, seen, device=before.device).expand_as(before)
    after = torch.where(first, before, late)
    for sequence in range(before.shape[0]):
        for head in range(head_group.residual_keys.shape[1]):
            line = head_group.residual_keys[sequence, head, :count]
            at, to = (_at(table, each[sequence, head]) for each in (before, after))
            line.copy_(turned(line[None, None], at, to)[0, 0])
    head_group.residual_positions[:, :, :count] = after.int()


def _at(table: Rotation, positions: Tensor) -> Rotation:
    """Rotations of `(n,)` positions."""
    cos, sin = table
    return cos[:, positions], sin[:, positions]
