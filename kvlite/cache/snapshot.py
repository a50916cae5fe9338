"""Layers as named tensors and JSON values that say how they fit together; and back.

Only filled slots are saved, and shared parts once. A file can only create objects of the classes in
`kinds`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol, get_origin, get_type_hints

import torch
from torch import Tensor

from kvlite.cache.bits import KVBits, with_form
from kvlite.cache.head_group import KVHeadGroup, PackedSource
from kvlite.cache.kv_size import KVSize
from kvlite.cache.layer import LayerCache
from kvlite.cache.packed import Packed
from kvlite.cache.pair import Half, Merged
from kvlite.cache.quantization import FORMS
from kvlite.cache.recurrent import RecurrentState, States
from kvlite.cache.segment import Exact
from kvlite.cache.sound import require, require_sound
from kvlite.errors import SnapshotError

Plain = dict[str, Any]
"""JSON values."""

_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (KVBits, Exact, Packed, Merged, Half, PackedSource)
}


def kinds() -> dict[str, type]:
    """The classes of objects that a file can create, by name."""
    forms = {form.vectors.__name__: form.vectors for form in FORMS.values()}
    # Versions before 0.2.0 called it otherwise.
    return {**_KINDS, **forms, "Quantized": FORMS[""].vectors}


class Source(Protocol):
    """A file of named tensors."""

    def new(self, name: str, device: torch.device) -> Tensor:
        """Read a tensor. Raises SnapshotError if it is missing or damaged."""

    def fill(self, name: str, into: Tensor) -> None:
        """Read a tensor into another of its shape and type; errors as of `new`."""


class LayerWriter:
    """Takes layers apart: into tensors by name, beginning with `prefix`, and objects of the classes
    of `kinds`, each after those that it refers to."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self.objects: list[Plain] = []
        self._names: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        self._kinds = kinds()

    def layer(self, name: str, layer: LayerCache, filled: int | None = None) -> Plain:
        """Add a layer; returns how its parts fit together.

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
                self._head_group(f"{name}.{number}", each, each.used if filled is None else filled)
                for number, each in enumerate(layer.head_groups)
            ],
        }

    def _head_group(self, name: str, head_group: KVHeadGroup, used: int) -> Plain:
        if head_group.selection_scores is not None:
            raise SnapshotError("a conversation cannot be saved while it reads: save it afterwards")
        own, plain = slice(0, used - head_group.segment_len), dict[str, Any]()
        if head_group.rows is not None:
            plain["remembered"] = self.tensor(f"{name}.rows", head_group.rows[..., :used])
        positions = head_group.residual_positions
        keys = values = self.tensor(f"{name}.keys", head_group.residual_keys[:, :, own])
        if not head_group.latent:
            values = self.tensor(f"{name}.values", head_group.residual_values[:, :, own])
        return {
            "heads": list(head_group.heads),
            "capacity": head_group.capacity,
            "own": head_group.residual_keys.shape[2],
            "spare": head_group.spare,
            "used": used,
            "newest_row": head_group.history_index,
            "keys": keys,
            "values": values,
            "positions": self.tensor(f"{name}.positions", positions[:, :, own]),
            "front": self._object(head_group.segment),
            "former": self._object(head_group.packed_before),
            **({"shares_keys": True} if head_group.shares_keys else {}),
            **plain,
        }

    def states(self, states: Mapping[int, States]) -> Plain:
        """Add the states of recurrent layers; returns where they belong."""
        return {
            f"{index}": {
                f"{place}": {
                    part: self.tensor(f"{index}.{place}.{part}", tensor)
                    for part in ("conv", "recurrent")
                    if (tensor := getattr(state, part)) is not None
                }
                for place, state in own.items()
            }
            for index, own in states.items()
        }

    def tensor(self, name: str, tensor: Tensor) -> str:
        """Add a tensor; returns its whole name."""
        whole = f"{self.prefix}.{name}"
        self.tensors[whole] = tensor
        return whole

    def _object(self, value: Any) -> int | None:
        if value is None:
            return None
        if id(value) not in self._numbers:
            plain = {name: self._field(value, name) for name in _saved(type(value))}
            self._numbers[id(value)] = len(self.objects)
            self.objects.append({"kind": type(value).__name__, **plain})
        return self._numbers[id(value)]

    def _field(self, owner: Any, name: str) -> Any:
        value = getattr(owner, name)
        if isinstance(value, Tensor):
            if id(value) not in self._names:
                self._names[id(value)] = self.tensor(f"part{len(self._names)}.{name}", value)
            return self._names[id(value)]
        if type(value).__name__ in self._kinds:
            return {"object": self._object(value)}
        return list(value) if isinstance(value, tuple) else value


@dataclass
class LayerReader:
    """Puts layers together again.

    Attributes:
        objects: as of `LayerWriter`; each is made when it is first asked for, and only once.
        device, dtype: of all layers.
        seen: tokens read; all positions are below.
    """

    source: Source
    objects: Sequence[Plain]
    device: torch.device
    dtype: torch.dtype
    seen: int
    _made: dict[int, Any] = field(default_factory=dict)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _kinds: dict[str, type] = field(default_factory=kinds)

    def layer(
        self,
        plain: Plain,
        size: KVSize,
        prepare: Callable[[LayerCache], None] | None = None,
    ) -> LayerCache:
        """A layer from how its parts fit together.

        Args:
            prepare: called before it is filled.

        Raises:
            SnapshotError: it is damaged, or of another model.
        """
        head_groups = plain["banks"]
        head_alias = {int(head): int(other) for head, other in plain["like"]}
        held = [head for each in head_groups for head in each["heads"]]
        require(sorted([*held, *head_alias]) == list(range(size.heads)))
        require({*head_alias.values()} <= {*held})
        own = [each["own"] for each in head_groups if "own" in each]
        require(len(own) in (0, len(head_groups)))
        layer = LayerCache(
            [(tuple(each["heads"]), each["capacity"]) for each in head_groups],
            batch=1,
            dim=size.dim,
            dtype=self.dtype,
            device=self.device,
            decode_rows=plain["rows"],
            segments=[self._segment(each) for each in head_groups],
            latent=size.latent,
            sharing=[bool(each.get("shares_keys")) for each in head_groups],
            own=own,
        )
        if prepare is not None:
            prepare(layer)
        for head_group, each in zip(layer.head_groups, head_groups, strict=True):
            self._fill(head_group, each)
            head_group.head_alias = {
                head: other for head, other in head_alias.items() if other in head_group.heads
            }
        return layer

    def states(self, plain: Plain, device_of: Callable[[int], torch.device]) -> dict[int, States]:
        """The states of recurrent layers, by layer, each on the device that it says for the layer.
        Raises SnapshotError if they are damaged."""
        made = dict[int, States]()
        for index, own in plain.items():
            read = partial(self.source.new, device=device_of(int(index)))
            made[int(index)] = {
                int(place): RecurrentState(**{part: read(name) for part, name in parts.items()})
                for place, parts in own.items()
            }
        return made

    def _segment(self, plain: Plain) -> Packed | Half | None:
        """A head group's segment, in storage with room for as many more as it had."""
        segment: Packed | Half | None = self._object(plain["front"], Packed | Half)
        spare = plain.get("spare", 0)
        require(type(spare) is int and spare >= 0)
        packed = None if segment is None else segment.packed
        return packed.with_room(spare) if packed is not None and spare else segment

    def _fill(self, head_group: KVHeadGroup, plain: Plain) -> None:
        segment: Packed | Half | None = self._object(plain["front"], Packed | Half)
        used, heads, latent = plain["used"], len(head_group.heads), head_group.latent
        dim = head_group.residual_keys.shape[3]
        require(head_group.segment_len <= used <= min(head_group.slots, head_group.capacity))
        own = slice(0, used - head_group.segment_len)
        self.source.fill(plain["keys"], head_group.residual_keys[:, :, own])
        require((plain["values"] == plain["keys"]) == latent)
        if not latent:
            self.source.fill(plain["values"], head_group.residual_values[:, :, own])
        self.source.fill(plain["positions"], head_group.residual_positions[:, :, own])
        self._require_seen(head_group.residual_positions[:, :, own])
        if segment is not None:
            require(segment.start <= own.stop and segment.positions.shape[:2] == (1, heads))
            require(_dim(segment) == dim and segment.latent == latent)
            self._require_seen(segment.positions)
        if head_group.rows is not None:
            require(-1 <= plain["newest_row"] < head_group.rows.shape[2])
            self.source.fill(plain["remembered"], head_group.rows[..., :used])
        head_group.used, head_group.history_index = used, plain["newest_row"]
        head_group.packed_before = self._object(plain["former"], PackedSource)
        if head_group.packed_before is not None:
            packed = head_group.packed_before.packed
            require(_dim(packed) == dim and packed.latent == latent)
            require(len(head_group.packed_before.rows) == heads)

    def _require_seen(self, positions: Tensor) -> None:
        if positions.numel():
            low, high = positions.aminmax()
            require(int(low) >= 0 and int(high) < self.seen)

    def _object(self, number: int | None, kind: Any) -> Any:
        if number is None:
            return None
        if number not in self._made:
            made = self._made[number] = self._new_object(number)
            require_sound(made)
        require(isinstance(self._made[number], kind))
        return self._made[number]

    def _new_object(self, number: int) -> Any:
        require(0 <= number < len(self.objects))
        plain = self.objects[number]
        kind = self._kinds[plain["kind"]]
        plain = with_form(plain) if kind is KVBits else plain
        # Each comes after those that it refers to, so this ends.
        for each in plain.values():
            require(type(each) is not dict or each["object"] < number)
        hints = get_type_hints(kind)
        return kind(**{name: self._field(hints[name], plain[name]) for name in _saved(kind)})

    def _field(self, hint: Any, plain: Any) -> Any:
        if hint is Tensor:
            if plain not in self._tensors:
                self._tensors[plain] = self.source.new(plain, self.device)
            return self._tensors[plain]
        if hint in (int, bool, str):
            require(type(plain) is hint)
            return plain
        if get_origin(hint) is tuple:
            return tuple(int(each) for each in plain)
        return self._object(plain["object"], hint)


def _saved(kind: type[Any]) -> list[str]:
    """The fields of a part that are saved: not what it is the beginning of."""
    return [each.name for each in fields(kind) if each.name != "storage"]


def _dim(segment: Packed | Half) -> int:
    return segment.mean.shape[2] if isinstance(segment, Packed) else segment.keys.exact.shape[3]
