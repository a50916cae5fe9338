"""Layers as named tensors and JSON values that say how they fit together; and back.

Only filled slots are saved, and shared parts once. Nothing but the classes in `KINDS` can be made
from a file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, get_origin, get_type_hints

import torch
from torch import Tensor

from kvlite.cache.bits import KVBits
from kvlite.cache.by_channel import ByChannel
from kvlite.cache.head_group import KVHeadGroup, PackedSource
from kvlite.cache.layer import LayerCache
from kvlite.cache.packed import Packed
from kvlite.cache.pair import Half, Merged
from kvlite.cache.quantized import Quantized
from kvlite.cache.segment import Exact
from kvlite.cache.sound import require, require_sound
from kvlite.errors import SnapshotError

Plain = dict[str, Any]
"""JSON values."""

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (KVBits, Exact, Quantized, ByChannel, Packed, Merged, Half, PackedSource)
}


class Source(Protocol):
    """A file of named tensors."""

    def new(self, name: str, device: torch.device) -> Tensor:
        """Read a tensor.

        Raises:
            SnapshotError: it is missing or damaged.
        """

    def fill(self, name: str, into: Tensor) -> None:
        """Read a tensor into another of its shape and type; errors as of `new`."""


class Parts:
    """Layers taken apart: tensors by name, beginning with `prefix`, and objects of the classes in
    `KINDS`, each after those that it refers to."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self.objects: list[Plain] = []
        self._names: dict[int, str] = {}
        self._numbers: dict[int, int] = {}

    def tensor(self, name: str, tensor: Tensor) -> str:
        """Add a tensor; returns its whole name."""
        whole = f"{self.prefix}.{name}"
        self.tensors[whole] = tensor
        return whole

    def object(self, value: Any) -> int:
        """Add an object, once; returns its number."""
        if id(value) not in self._numbers:
            plain = {each.name: self._field(value, each.name) for each in fields(value)}
            self._numbers[id(value)] = len(self.objects)
            self.objects.append({"kind": type(value).__name__, **plain})
        return self._numbers[id(value)]

    def _field(self, owner: Any, name: str) -> Any:
        value = getattr(owner, name)
        if isinstance(value, Tensor):
            if id(value) not in self._names:
                self._names[id(value)] = self.tensor(f"part{len(self._names)}.{name}", value)
            return self._names[id(value)]
        if type(value).__name__ in KINDS:
            return {"object": self.object(value)}
        return list(value) if isinstance(value, tuple) else value


class Whole:
    """Puts objects together again on a device, each when it is first asked for."""

    def __init__(self, source: Source, objects: Sequence[Plain], device: torch.device) -> None:
        self.source = source
        self.objects = objects
        self.device = device
        self._made: dict[int, Any] = {}
        self._tensors: dict[str, Tensor] = {}

    def object(self, number: int | None, kind: Any) -> Any:
        """One of the objects, the same one every time; None for None.

        Raises:
            SnapshotError: it is damaged, or not of the class(es) `kind`.
        """
        if number is None:
            return None
        if number not in self._made:
            made = self._made[number] = self._object(number)
            require_sound(made)
        require(isinstance(self._made[number], kind))
        return self._made[number]

    def _object(self, number: int) -> Any:
        require(0 <= number < len(self.objects))
        plain = self.objects[number]
        kind = KINDS[plain["kind"]]
        # Each comes after those that it refers to, so this ends.
        for each in plain.values():
            require(type(each) is not dict or each["object"] < number)
        hints = get_type_hints(kind)
        return kind(**{name: self._field(hint, plain[name]) for name, hint in hints.items()})

    def _field(self, hint: Any, plain: Any) -> Any:
        if hint is Tensor:
            if plain not in self._tensors:
                self._tensors[plain] = self.source.new(plain, self.device)
            return self._tensors[plain]
        if hint in (int, bool):
            require(type(plain) is hint)
            return plain
        if get_origin(hint) is tuple:
            return tuple(int(each) for each in plain)
        return self.object(plain["object"], hint)


def described(parts: Parts, name: str, layer: LayerCache, filled: int | None = None) -> Plain:
    """Take a layer apart.

    Args:
        name: its tensors' names begin with it.
        filled: slots to save, if not all that are filled.

    Raises:
        SnapshotError: the conversation is still reading.
    """
    return {
        "rows": layer.rows,
        "like": [[head, other] for head, other in layer.head_alias.items()],
        "banks": [
            _head_group(
                parts, f"{name}.{number}", head_group, head_group.used if filled is None else filled
            )
            for number, head_group in enumerate(layer.head_groups)
        ],
    }


def _head_group(parts: Parts, name: str, head_group: KVHeadGroup, used: int) -> Plain:
    if head_group.selection_scores is not None:
        raise SnapshotError("a conversation cannot be saved while it reads: save it afterwards")
    own, plain = slice(0, used - head_group.segment_len), dict[str, Any]()
    if head_group.rows is not None:
        plain["remembered"] = parts.tensor(f"{name}.rows", head_group.rows[..., :used])
    return {
        "heads": list(head_group.heads),
        "capacity": head_group.capacity,
        "used": used,
        "newest_row": head_group.history_index,
        "keys": parts.tensor(f"{name}.keys", head_group.residual_keys[:, :, own]),
        "values": parts.tensor(f"{name}.values", head_group.residual_values[:, :, own]),
        "positions": parts.tensor(f"{name}.positions", head_group.residual_positions[:, :, own]),
        "front": None if head_group.segment is None else parts.object(head_group.segment),
        "former": None
        if head_group.packed_before is None
        else parts.object(head_group.packed_before),
        **plain,
    }


@dataclass(frozen=True)
class Form:
    """What all layers of a model's cache have in common.

    Attributes:
        seen: tokens read; all positions are below.
        prepare: called with each layer before it is filled.
    """

    kv_heads: int
    dim: int
    dtype: torch.dtype
    seen: int
    prepare: Callable[[LayerCache], None] | None = None


def layer_of(whole: Whole, plain: Plain, form: Form) -> LayerCache:
    """Put a layer together again.

    Raises:
        SnapshotError: it is damaged, or of another model.
    """
    head_groups = plain["banks"]
    head_alias = {int(head): int(other) for head, other in plain["like"]}
    held = [head for each in head_groups for head in each["heads"]]
    require(
        sorted([*held, *head_alias]) == list(range(form.kv_heads))
        and {*head_alias.values()} <= {*held}
    )
    segments = [whole.object(each["front"], Packed | Half) for each in head_groups]
    layer = LayerCache(
        [(tuple(each["heads"]), each["capacity"]) for each in head_groups],
        batch=1,
        dim=form.dim,
        dtype=form.dtype,
        device=whole.device,
        decode_rows=plain["rows"],
        segments=segments,
        head_alias=head_alias,
    )
    if form.prepare is not None:
        form.prepare(layer)
    for head_group, each in zip(layer.head_groups, head_groups, strict=True):
        _fill(whole, head_group, each, form)
    return layer


def _fill(whole: Whole, head_group: KVHeadGroup, plain: Plain, form: Form) -> None:
    segment: Packed | Half | None = whole.object(plain["front"], Packed | Half)
    used = plain["used"]
    require(head_group.segment_len <= used <= head_group.capacity)
    own = slice(0, used - head_group.segment_len)
    whole.source.fill(plain["keys"], head_group.residual_keys[:, :, own])
    whole.source.fill(plain["values"], head_group.residual_values[:, :, own])
    whole.source.fill(plain["positions"], head_group.residual_positions[:, :, own])
    require_known(head_group.residual_positions[:, :, own], form.seen)
    if segment is not None:
        require(
            segment.start <= own.stop and segment.positions.shape[:2] == (1, len(head_group.heads))
        )
        require(_dim(segment) == form.dim)
        require_known(segment.positions, form.seen)
    if head_group.rows is not None:
        require(-1 <= plain["newest_row"] < head_group.rows.shape[2])
        whole.source.fill(plain["remembered"], head_group.rows[..., :used])
    head_group.used, head_group.history_index = used, plain["newest_row"]
    head_group.packed_before = whole.object(plain["former"], PackedSource)
    if head_group.packed_before is not None:
        require(_dim(head_group.packed_before.packed) == form.dim)
        require(len(head_group.packed_before.rows) == len(head_group.heads))


def _dim(segment: Packed | Half) -> int:
    """Channels of its keys."""
    return segment.mean.shape[2] if isinstance(segment, Packed) else segment.keys.exact.shape[3]


def require_known(positions: Tensor, seen: int) -> None:
    """Raises SnapshotError unless positions are those of tokens that were read."""
    if positions.numel():
        low, high = positions.aminmax()
        require(int(low) >= 0 and int(high) < seen)
