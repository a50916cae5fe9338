"""A layer with room for what it is going to read."""

from kvlite.cache import LayerCache, Selection
from kvlite.cache.layer import Mark
from kvlite.cache.packed import Packed
from kvlite.methods.layer_policy import Rule


def grows(rule: Rule, layer: LayerCache, new: int) -> bool:
    """Whether a layer will keep all that it holds and `new` tokens, as they are, and remember as
    many rows as it does: then it can grow. Any other is read into a copy, so that stopping loses
    nothing."""
    rows = rule.method.decode_rows
    same = layer.rows == rows or not layer.entries_mean
    same &= not (layer.computed and rule.method.bounded)
    same &= rule.packs is None and not layer.packed
    counted = [(heads, used + new) for heads, used in rule.counted(layer)]
    return same and rule.keeps_all(counted) and rule.method.settles != "read"


def roomy_copy(rule: Rule, layer: LayerCache, new: int, chunk: int) -> LayerCache:
    """A copy with room for `new` tokens, or under a lambda mask for a chunk of them, with what is
    quantized written out."""
    sizes = [used + new for _, used in layer.lines]
    if rule.mask is not None:
        sizes = [
            min(size, max(used, rule.budget) + chunk)
            for (_, used), size in zip(layer.lines, sizes, strict=True)
        ]
        # What slides must be written out, not lie behind a front.
        everything = [Selection.everything(bank) for bank in layer.banks]
        return LayerCache.gathered(
            everything, sizes, like=layer.like, origins=rule.bits is not None
        )
    origins = rule.bits is not None and rule.partner is None
    held = rule.method.decode_rows if rule.method.judges_once else 0
    return layer.resized(sizes, held, origins=origins)


def rewound(layer: LayerCache, marks: list[Mark]) -> LayerCache:
    """A layer that grew without what it read since it was marked; in place, unless it was quantized
    in the meantime."""
    if not layer.packed:
        layer.rewind(marks)
        return layer
    kept = [
        Selection(bank, Selection.everything(bank).slots[:, :, : mark.used])
        for bank, mark in zip(layer.banks, marks, strict=True)
    ]
    front = next(bank.front for bank in layer.banks if isinstance(bank.front, Packed))
    sizes = [mark.used for mark in marks]
    before = LayerCache.gathered(kept, sizes, layer.rows, like=layer.like, bits=front.bits)
    for bank, mark in zip(before.banks, marks, strict=True):
        if bank.rows is not None and mark.rows is not None:
            bank.rows.copy_(mark.rows[..., : bank.used])
            bank.newest_row = mark.newest_row
    return before
