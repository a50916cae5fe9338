"""Layers as named tensors and a plain description of how these fit together; and back.

Only filled slots are taken, and what layers share is taken once. A description names classes of one
fixed list: nothing else can be made from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, get_origin, get_type_hints

import torch
from torch import Tensor

from kvlite.cache.bank import Bank, Origin
from kvlite.cache.bits import KVBits
from kvlite.cache.by_channel import ByChannel
from kvlite.cache.front import Exact
from kvlite.cache.layer import LayerCache
from kvlite.cache.packed import Packed
from kvlite.cache.pair import Half, Merged
from kvlite.cache.quantized import Quantized
from kvlite.cache.sound import require, require_sound
from kvlite.errors import SnapshotError

Plain = dict[str, Any]
"""What JSON can hold."""

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (KVBits, Exact, Quantized, ByChannel, Packed, Merged, Half, Origin)
}


class Source(Protocol):
    """Where tensors come from, by name."""

    def new(self, name: str, device: torch.device) -> Tensor:
        """One in storage of its own.

        Raises:
            SnapshotError: it is damaged, or there is none.
        """

    def fill(self, name: str, into: Tensor) -> None:
        """Copy one into another of its shape and type; errors as of `new`."""


class Parts:
    """What layers are made of, taken apart.

    Attributes:
        tensors: by name, where they lie.
        objects: of the classes in `KINDS`, each after those that it holds.
    """

    def __init__(self, prefix: str) -> None:
        """Names of tensors begin with `prefix`."""
        self.prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self.objects: list[Plain] = []
        self._names: dict[int, str] = {}
        self._numbers: dict[int, int] = {}

    def tensor(self, name: str, tensor: Tensor) -> str:
        """Take a tensor; its whole name."""
        whole = f"{self.prefix}.{name}"
        self.tensors[whole] = tensor
        return whole

    def object(self, value: Any) -> int:
        """Take an object of the classes in `KINDS`; its number, the same for the same object."""
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
    """What was taken apart, put together on a device as it is asked for."""

    def __init__(self, source: Source, objects: Sequence[Plain], device: torch.device) -> None:
        """Nothing is read yet."""
        self.source = source
        self.objects = objects
        self.device = device
        self._made: dict[int, Any] = {}
        self._tensors: dict[str, Tensor] = {}

    def object(self, number: int | None, kind: Any) -> Any:
        """One of the objects, the same one every time; None for None.

        Args:
            kind: the class, or classes, that it must be of.

        Raises:
            SnapshotError: it is of another, or damaged.
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
        # Each comes after those that it holds, so this ends.
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
    """A layer, taken apart.

    Args:
        name: its tensors' names begin with that.
        filled: slots that count, if not all that are filled; then what banks remember does not.

    Raises:
        SnapshotError: it waits for others to be read.
    """
    return {
        "rows": layer.rows,
        "like": [[head, other] for head, other in layer.like.items()],
        "banks": [
            _bank(parts, f"{name}.{number}", bank, bank.used if filled is None else filled)
            for number, bank in enumerate(layer.banks)
        ],
    }


def _bank(parts: Parts, name: str, bank: Bank, used: int) -> Plain:
    if bank.votes is not None:
        raise SnapshotError("a conversation cannot be saved while it reads: save it afterwards")
    own, plain = slice(0, used - bank.in_front), dict[str, Any]()
    if bank.rows is not None:
        plain["remembered"] = parts.tensor(f"{name}.rows", bank.rows[..., :used])
    return {
        "heads": list(bank.heads),
        "capacity": bank.capacity,
        "used": used,
        "newest_row": bank.newest_row,
        "keys": parts.tensor(f"{name}.keys", bank.own_keys[:, :, own]),
        "values": parts.tensor(f"{name}.values", bank.own_values[:, :, own]),
        "positions": parts.tensor(f"{name}.positions", bank.own_positions[:, :, own]),
        "front": None if bank.front is None else parts.object(bank.front),
        "former": None if bank.former is None else parts.object(bank.former),
        **plain,
    }


@dataclass(frozen=True)
class Form:
    """What every layer of a model's cache is like.

    Attributes:
        kv_heads, dim, dtype: of the model.
        seen: tokens read, above all positions.
        prepare: given a layer before it is filled.
    """

    kv_heads: int
    dim: int
    dtype: torch.dtype
    seen: int
    prepare: Callable[[LayerCache], None] | None = field(default=None)


def layer_of(whole: Whole, plain: Plain, form: Form) -> LayerCache:
    """A layer as it was, on the device of what it is put together from.

    Raises:
        SnapshotError: it is damaged, or of another model.
    """
    banks = plain["banks"]
    like = {int(head): int(other) for head, other in plain["like"]}
    held = [head for each in banks for head in each["heads"]]
    require(sorted([*held, *like]) == list(range(form.kv_heads)) and {*like.values()} <= {*held})
    fronts = [whole.object(each["front"], Packed | Half) for each in banks]
    layer = LayerCache(
        [(tuple(each["heads"]), each["capacity"]) for each in banks],
        batch=1,
        dim=form.dim,
        dtype=form.dtype,
        device=whole.device,
        decode_rows=plain["rows"],
        fronts=fronts,
        like=like,
    )
    if form.prepare is not None:
        form.prepare(layer)
    for bank, each in zip(layer.banks, banks, strict=True):
        _fill(whole, bank, each, form)
    return layer


def _fill(whole: Whole, bank: Bank, plain: Plain, form: Form) -> None:
    front: Packed | Half | None = whole.object(plain["front"], Packed | Half)
    used = plain["used"]
    require(bank.in_front <= used <= bank.capacity)
    own = slice(0, used - bank.in_front)
    whole.source.fill(plain["keys"], bank.own_keys[:, :, own])
    whole.source.fill(plain["values"], bank.own_values[:, :, own])
    whole.source.fill(plain["positions"], bank.own_positions[:, :, own])
    require_known(bank.own_positions[:, :, own], form.seen)
    if front is not None:
        require(front.start <= own.stop and front.positions.shape[:2] == (1, len(bank.heads)))
        require(_dim(front) == form.dim)
        require_known(front.positions, form.seen)
    if bank.rows is not None:
        require(-1 <= plain["newest_row"] < bank.rows.shape[2])
        whole.source.fill(plain["remembered"], bank.rows[..., :used])
    bank.used, bank.newest_row = used, plain["newest_row"]
    bank.former = whole.object(plain["former"], Origin)
    if bank.former is not None:
        require(_dim(bank.former.packed) == form.dim)
        require(len(bank.former.rows) == len(bank.heads))


def _dim(front: Packed | Half) -> int:
    """Channels of its keys."""
    return front.mean.shape[2] if isinstance(front, Packed) else front.keys.exact.shape[3]


def require_known(positions: Tensor, seen: int) -> None:
    """Raises SnapshotError if positions are not of tokens that were read."""
    if positions.numel():
        low, high = positions.aminmax()
        require(int(low) >= 0 and int(high) < seen)


def as_plain(bits: KVBits | None) -> Plain | None:
    """Bits by name."""
    return None if bits is None else {each.name: getattr(bits, each.name) for each in fields(bits)}


def bits_of(plain: Mapping[str, Any] | None) -> KVBits | None:
    """Bits from their names."""
    return None if plain is None else KVBits(**plain)
