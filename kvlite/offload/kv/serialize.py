"""The host store as named tensors and JSON values, and back: in memory or on disk."""

from dataclasses import asdict

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.cache.snapshot import LayerReader, LayerWriter, Plain, Source
from kvlite.cache.sound import require
from kvlite.model.load import LoadedModel
from kvlite.model.recurrent_states import require_states
from kvlite.offload.kv.index import Index, sign_bytes
from kvlite.offload.kv.store import HostKVLayer, HostKVStore

PREFIX = "tier"


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
    host = torch.device("cpu")
    reader = LayerReader(source, plain["objects"], host, model.dtype, store.seen)
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
    store.states = reader.states(plain.get("states", {}), lambda _: host)
    require_states(store.states, shape, model.dtype)


def _layer(cache: LayerCache, plain: Plain, reader: LayerReader) -> HostKVLayer:
    require(len(cache.head_groups) == 1 and cache.head_groups[0].used == plain["read"])
    layer = HostKVLayer(cache, plain["window"], plain["read"], scored_by=str(plain["judge"]))
    if "judged" in plain:
        layer.cached_scores = reader.source.new(plain["judged"], reader.device)
        require(layer.cached_scores.dtype == torch.float32 and layer.cached_scores.dim() == 3)
        require(layer.cached_scores.shape[:2] == (1, len(cache.head_groups[0].heads)))
        require(layer.cached_scores.shape[2] <= layer.read)
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
