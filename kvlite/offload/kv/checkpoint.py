"""States of a host store that can be restored: checkpoints in memory; and named tensors and JSON
values, for files."""

from dataclasses import asdict, dataclass
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from kvlite.cache import KVBits, LayerCache
from kvlite.cache.bits import with_form
from kvlite.cache.kv_size import KVSize
from kvlite.cache.recurrent import state_tensors
from kvlite.cache.segment import bytes_held
from kvlite.cache.snapshot import LayerReader, LayerWriter, Plain, Source
from kvlite.cache.sound import require
from kvlite.model.load import LoadedModel
from kvlite.model.recurrent_states import require_states
from kvlite.offload.kv.index import Index, sign_bytes
from kvlite.offload.kv.storage import Disk
from kvlite.offload.kv.store import HOST, HostKVLayer, HostKVStore

# Of the tensors' names in files.
PREFIX = "tier"


@dataclass(frozen=True)
class _LayerMark:
    """A layer's state; its entries stay in the store, where later ones follow them.

    Attributes:
        read: how many entries it had.
        window: all entries of a sliding window, since it drops what it will not see again.
        exact: in a quantized store, keys, values and positions that were not quantized then.
        cached_scores, scored_by, disk: as in `HostKVLayer`.
    """

    read: int
    window: LayerCache | None
    exact: tuple[Tensor, ...]
    cached_scores: Tensor | None
    scored_by: str
    disk: Disk | None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors held for it."""
        return [*self.exact, *(self.window.tensors if self.window else ())]


class HostKVCheckpoint:
    """The state of a host store after it read something: all, or the first `seen` tokens if the
    checkpoint of all is `plain`."""

    def __init__(self, store: HostKVStore, seen: int | None = None) -> None:
        store.forget_answer()
        self._store: ReferenceType[HostKVStore] = ref(store)
        self.seen = store.seen if seen is None else seen
        self.bits = store.bits
        self.layers = [_mark(layer, seen, store.bits is not None) for layer in store.layers]
        self.states = store.states

    @property
    def plain(self) -> bool:
        """Whether the number of tokens describes the checkpoint completely."""
        return not self.states and all(
            layer.read == self.seen and layer.cached_scores is None and not layer.tensors
            for layer in self.layers
        )

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the checkpoint holds, without the store."""
        held = [tensor for layer in self.layers for tensor in layer.tensors]
        return bytes_held([*held, *state_tensors(self.states)])

    def fits(self, store: HostKVStore | None) -> bool:
        """Whether a store can be restored to this: it is the same store, without new
        quantization."""
        if store is None or self._store() is not store:
            return False
        pairs = zip(self.layers, store.layers, strict=True)
        return all(mark.window is not None or self._holds(mark, layer) for mark, layer in pairs)

    def _holds(self, mark: _LayerMark, layer: HostKVLayer) -> bool:
        held = layer.head_group
        if not mark.exact:
            return held.segment is None
        packed = mark.read - mark.exact[0].shape[2]
        if held.packed is not None:
            return held.packed.bits == self.bits and held.packed.count >= packed
        return not packed

    def put_back(self, store: HostKVStore) -> None:
        """Restore a store that `fits` to this state, dropping everything it read since."""
        store.forget_answer()
        pairs = list(zip(store.layers, self.layers, strict=True))
        cut = [_cut(layer, mark) if mark.exact else None for layer, mark in pairs]
        # Nothing below allocates.
        for (layer, mark), made in zip(pairs, cut, strict=True):
            if mark.window is not None:
                layer.cache, layer.disk = mark.window, mark.disk
            elif made is not None:
                layer.cache, layer.disk = made, None
            layer.read = mark.read
            layer.cached_scores, layer.scored_by = mark.cached_scores, mark.scored_by
        store.seen, store.states = self.seen, self.states
        store.forget_answer()


def checkpoint_parts(made: HostKVCheckpoint, parts: LayerWriter) -> Plain:
    """Take a checkpoint apart; the store has its own file."""
    return {
        "seen": made.seen,
        "bits": None if made.bits is None else asdict(made.bits),
        "states": parts.states(made.states),
        "layers": [
            _plain_mark(f"{PREFIX}{at}", each, parts) for at, each in enumerate(made.layers)
        ],
    }


def checkpoint_from(
    plain: Plain, store: HostKVStore, reader: LayerReader, model: LoadedModel
) -> HostKVCheckpoint:
    """A checkpoint of a store that was read from the same file. Raises SnapshotError if it is
    damaged."""
    require(0 <= plain["seen"] <= store.seen and len(plain["layers"]) == len(store.layers))
    made = HostKVCheckpoint(store, plain["seen"])
    parts = zip(store.layers, plain["layers"], model.shape.kv_sizes, strict=True)
    made.layers = [_mark_from(layer, each, size, reader) for layer, each, size in parts]
    made.bits = None if plain["bits"] is None else KVBits(**with_form(plain["bits"]))
    made.states = reader.states(plain["states"], lambda _: HOST)
    require_states(made.states, model.shape, model.dtype)
    return made


def _plain_mark(name: str, mark: _LayerMark, parts: LayerWriter) -> Plain:
    window, scores = mark.window, mark.cached_scores
    return {
        "read": mark.read,
        "window": None if window is None else parts.layer(name, window, mark.read),
        "exact": [parts.tensor(f"{name}.{at}", each) for at, each in enumerate(mark.exact)],
        "judged": None if scores is None else parts.tensor(f"{name}.judged", scores),
        "judge": mark.scored_by,
    }


def _mark_from(layer: HostKVLayer, plain: Plain, size: KVSize, reader: LayerReader) -> _LayerMark:
    read, window, exact = plain["read"], None, tuple[Tensor, ...]()
    require(type(read) is int and read >= 0)
    require((plain["window"] is None) == (layer.window is None))
    if plain["window"] is not None:
        window = reader.layer(plain["window"], size)
        require(len(window.head_groups) == 1 and window.head_groups[0].used == read)
    else:
        require(read <= layer.read)
        exact = tuple(reader.source.new(each, HOST) for each in plain["exact"])
    for own, each in zip(layer.head_group.residuals, exact, strict=bool(exact)):
        require(each.dtype == own.dtype and each.dim() == own.dim() and each.shape[2] <= read)
        require(each.shape[:2] == own.shape[:2] and each.shape[3:] == own.shape[3:])
    scores = None if plain["judged"] is None else _scores(plain["judged"], size.heads, read, reader)
    return _LayerMark(read, window, exact, scores, str(plain["judge"]), None)


def _scores(name: str, heads: int, read: int, reader: LayerReader) -> Tensor:
    scores = reader.source.new(name, reader.device)
    require(scores.dtype == torch.float32 and scores.dim() == 3)
    require(scores.shape[:2] == (1, heads) and scores.shape[2] <= read)
    return scores


def _mark(layer: HostKVLayer, seen: int | None, quantizes: bool) -> _LayerMark:
    window, exact, head_group = None, tuple[Tensor, ...](), layer.head_group
    if layer.window is not None:
        window = layer.cache
    elif quantizes:  # what may still be
        own = slice(0, head_group.residual_len)
        exact = tuple(each[:, :, own].clone() for each in head_group.residuals)
    read = layer.read if seen is None else seen
    return _LayerMark(read, window, exact, layer.cached_scores, layer.scored_by, layer.disk)


def _cut(layer: HostKVLayer, mark: _LayerMark) -> LayerCache:
    # Each was quantized once, so they are unchanged.
    head_group, (keys, _, positions) = layer.head_group, mark.exact
    count, segment = mark.read - keys.shape[2], head_group.packed
    heads = [*range(len(head_group.heads))]
    if segment is not None:
        segment = segment.take(torch.arange(count).expand(*positions.shape[:2], -1), heads)
    cut = layer.cache.empty_like([mark.read], segments=[segment if count else None])
    (made,) = cut.head_groups
    for own, exact in zip(made.residuals, mark.exact, strict=True):
        own[:] = exact
    made.used = mark.read
    return cut


def store_parts(store: HostKVStore) -> tuple[dict[str, Tensor], Plain]:
    """Take a host store apart, without the last answer, which will be read again."""
    store.wait()
    parts = LayerWriter(PREFIX)
    layers = [_described(parts, f"{index}", layer) for index, layer in enumerate(store.layers)]
    return parts.tensors, {
        "bits": None if store.bits is None else asdict(store.bits),
        "seen": store.seen,
        "objects": parts.objects,
        "layers": layers,
        "states": parts.states(store.states),
    }


def _described(parts: LayerWriter, name: str, layer: HostKVLayer) -> Plain:
    plain: Plain = {
        "cache": parts.layer(name, layer.cache, layer.read),
        "read": layer.read,
        "window": layer.window,
        "judge": layer.scored_by,
    }
    if layer.cached_scores is not None:
        plain["judged"] = parts.tensor(f"{name}.judged", layer.cached_scores)
    if (index := layer.index) is not None:
        own = slice(0, layer.read)
        plain["index"] = {
            "capacity": index.capacity,
            "signs": parts.tensor(f"{name}.signs", index.signs[:, :, own]),
            "sizes": parts.tensor(f"{name}.sizes", index.sizes[:, :, own]),
            "mean": parts.tensor(f"{name}.mean", index.mean),
            "balance": parts.tensor(f"{name}.balance", index.balance),
        }
    return plain


def fill_store(store: HostKVStore, source: Source, plain: Plain, model: LoadedModel) -> None:
    """Fill an empty host store, which was placed, with one that was taken apart.

    Raises:
        SnapshotError: it is damaged, or of another model.
        RecallError: the disk is full or fails.
    """
    store.seen, shape, disk = plain["seen"], model.shape, store.disk
    require(len(plain["layers"]) == shape.layers)
    reader = LayerReader(source, plain["objects"], HOST, model.dtype, store.seen)
    parts = zip(plain["layers"], shape.window_sizes, shape.kv_sizes, strict=True)
    for index, (each, window, size) in enumerate(parts):
        plain_in_memory = disk is None and store.bits is None
        transfer = store.transfer(model.device_of(index)) if plain_in_memory else None
        pin = transfer.pin if transfer is not None and window is None else None
        layer = store.layers[index] = _layer(reader.layer(each["cache"], size, pin), each, reader)
        require(layer.window == window)
        if "index" in each:
            layer.index = _index(source, each["index"], layer.read, model, model.device_of(index))
        if disk is not None:
            disk.take(layer.cache)
            layer.disk = disk
    store.states = reader.states(plain.get("states", {}), lambda _: HOST)
    require_states(store.states, shape, model.dtype)


def _layer(cache: LayerCache, plain: Plain, reader: LayerReader) -> HostKVLayer:
    require(len(cache.head_groups) == 1 and cache.head_groups[0].used == plain["read"])
    layer = HostKVLayer(cache, plain["window"], plain["read"], scored_by=str(plain["judge"]))
    if "judged" in plain:
        heads = len(cache.head_groups[0].heads)
        layer.cached_scores = _scores(plain["judged"], heads, layer.read, reader)
    return layer


def _index(
    source: Source, plain: Plain, read: int, model: LoadedModel, device: torch.device
) -> Index:
    heads, dim = model.shape.kv_heads, model.shape.head_dim
    room = plain["capacity"]
    require(room >= read)
    signs = torch.empty(1, heads, room, sign_bytes(dim), dtype=torch.uint8, device=device)
    sizes = torch.empty(1, heads, room, device=device)
    mean, balance = (torch.empty(1, heads, dim, device=device) for _ in range(2))
    own = {"signs": signs[:, :, :read], "sizes": sizes[:, :, :read]}
    for name, into in (own | {"mean": mean, "balance": balance}).items():
        source.fill(plain[name], into)
    return Index(signs, sizes, mean, balance, read)
