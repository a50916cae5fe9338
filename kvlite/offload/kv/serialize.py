"""The host store as named tensors and a JSON description, and back."""

from dataclasses import replace
from typing import Any

import torch

from kvlite.cache.snapshot import (
    Form,
    Parts,
    Plain,
    Source,
    Whole,
    as_plain,
    bits_of,
    described,
    layer_of,
)
from kvlite.cache.sound import require
from kvlite.model.shape import ModelShape
from kvlite.offload.kv.disk import Disk
from kvlite.offload.kv.index import Index, sign_bytes
from kvlite.offload.kv.store import HostKVLayer, HostKVStore
from kvlite.offload.kv.transfer import transfer_to

PREFIX = "tier"


def store_parts(store: HostKVStore) -> tuple[Parts, Plain]:
    """A host store as tensors and a description, without the last answer, which will be read
    again."""
    if store.transfer is not None:
        store.transfer.wait()
    parts = Parts(PREFIX)
    layers = [_described(parts, f"{index}", layer) for index, layer in enumerate(store.layers)]
    return parts, {
        "bits": as_plain(store.bits),
        "seen": store.seen,
        "objects": parts.objects,
        "layers": layers,
    }


def _described(parts: Parts, name: str, layer: HostKVLayer) -> Plain:
    plain: Plain = {
        "cache": described(parts, name, layer.cache, layer.read),
        "read": layer.read,
        "window": layer.window,
        "judge": layer.scored_by,
    }
    if layer.cached_scores is not None:
        plain["judged"] = parts.tensor(f"{name}.judged", layer.cached_scores)
    if (index := layer.index) is not None:
        own = slice(0, layer.read)
        plain["index"] = {
            "capacity": index.sizes.shape[2],
            "signs": parts.tensor(f"{name}.signs", index.signs[:, :, own]),
            "sizes": parts.tensor(f"{name}.sizes", index.sizes[:, :, own]),
            "mean": parts.tensor(f"{name}.mean", index.mean),
            "balance": parts.tensor(f"{name}.balance", index.balance),
        }
    return plain


def store_of(
    source: Source,
    plain: Plain,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    disk: Disk | None,
    spare: bool,
) -> HostKVStore:
    """The inverse of `store_parts`.

    Args:
        dtype: of the model's keys and values.
        device: the model's, for indexes.
        disk: where the store goes, a layer at a time, if not to memory.
        spare: as in `HostKVStore`.

    Raises:
        SnapshotError: it is damaged, or of another model.
        RecallError: the disk is full or fails.
    """
    bits, host = bits_of(plain["bits"]), torch.device("cpu")
    store = replace(
        HostKVStore.empty(shape, dtype, bits), seen=plain["seen"], disk=disk, spare=spare
    )
    if disk is None and bits is None:
        store.transfer = transfer_to(device)
    require(len(plain["layers"]) == shape.layers)
    whole = Whole(source, plain["objects"], host)
    form = Form(shape.kv_heads, shape.head_dim, dtype, store.seen)
    for index, each in enumerate(plain["layers"]):
        own = form
        if store.transfer is not None and shape.windows[index] is None:
            own = replace(form, prepare=store.transfer.pin)
        layer = store.layers[index] = _layer(whole, each, shape, own, device)
        require(layer.window == shape.windows[index])
        if disk is not None:
            disk.take(layer.cache)
            layer.disk = disk
    return store


def _layer(
    whole: Whole, plain: Plain, shape: ModelShape, form: Form, device: torch.device
) -> HostKVLayer:
    cache = layer_of(whole, plain["cache"], form)
    require(len(cache.head_groups) == 1 and cache.head_groups[0].used == plain["read"])
    layer = HostKVLayer(cache, plain["window"], plain["read"], scored_by=str(plain["judge"]))
    if "judged" in plain:
        layer.cached_scores = whole.source.new(plain["judged"], whole.device)
        require(layer.cached_scores.dtype == torch.float32 and layer.cached_scores.dim() == 3)
        require(layer.cached_scores.shape[:2] == (1, shape.kv_heads))
        require(layer.cached_scores.shape[2] <= layer.read)
    if "index" in plain:
        layer.index = _index(whole.source, plain["index"], layer.read, shape, device)
    return layer


def _index(source: Source, plain: Plain, read: int, shape: ModelShape, device: Any) -> Index:
    heads, dim, room = shape.kv_heads, shape.head_dim, plain["capacity"]
    require(room >= read)
    signs = torch.empty(1, heads, room, sign_bytes(dim), dtype=torch.uint8, device=device)
    sizes = torch.empty(1, heads, room, device=device)
    mean, balance = (torch.empty(1, heads, dim, device=device) for _ in range(2))
    source.fill(plain["signs"], signs[:, :, :read])
    source.fill(plain["sizes"], sizes[:, :, :read])
    source.fill(plain["mean"], mean)
    source.fill(plain["balance"], balance)
    return Index(signs, sizes, mean, balance, read)
