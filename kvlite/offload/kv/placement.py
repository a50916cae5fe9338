"""The size of the host store, and whether it goes to memory or to disk."""

from kvlite.cache import KVBits
from kvlite.config.paths import cache_folder
from kvlite.config.units import readable
from kvlite.errors import RecallError
from kvlite.memory.device_budget import ram_limit
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.shape import ModelShape
from kvlite.offload.kv.index import sign_bytes
from kvlite.offload.kv.storage import Disk
from kvlite.offload.kv.store import SPARE, HostKVStore


def host_kv_bytes(
    shape: ModelShape, tokens: int, reserve: int, itemsize: int, bits: KVBits | None
) -> int:
    """Bytes of a host store that has read `tokens` at once, with room for `reserve` tokens of an
    answer, whose entries are exact; `itemsize` is that of keys and values."""
    total = 0
    for window, size in zip(shape.windows, shape.kv_sizes, strict=True):
        entries = tokens + reserve if window is None else min(window.size, tokens)
        packed = 0 if bits is None or window is not None else bits.packed(tokens)
        line = (entries - packed) * size.entry_bytes(itemsize)
        if bits is not None and packed:
            line += packed * bits.entry_bytes(size) + 4 * size.dim
        total += size.heads * line
    return total


def index_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of a host store's indexes on the device for `tokens`, including the room for an
    answer."""
    line = tokens * (sign_bytes(shape.head_dim) + 4) + 8 * shape.head_dim
    return len(shape.full_layers) * shape.kv_heads * line


def place(config: EngineConfig, store: HostKVStore, needed: int) -> list[str]:
    """Decide where a host store goes that will take `needed` bytes, and whether its layers may
    reserve more; returns messages for the user. Raises RecallError if it fits nowhere."""
    settings = config.settings
    limit = ram_limit(config.recall_limit, 0 if store.on_disk else store.nbytes)
    stays = store.on_disk and settings.recall == "auto"
    if settings.recall != "disk" and not stays and needed <= limit:
        store.disk, store.spare = None, needed + needed // SPARE <= limit
        return []
    if settings.recall == "ram":
        raise RecallError(
            f"recall would take {readable(needed)} of host memory, and may take {readable(limit)}: "
            "what is dropped is forgotten; --recall-bits 4 takes a quarter, --recall-limit sets "
            "another limit, --recall disk takes none"
        )
    disk = Disk(cache_folder() / "recall")
    disk.require(_written(store, needed))
    store.disk, store.spare = disk, False
    if settings.recall == "disk" or store.on_disk:
        return []
    return [
        f"recall takes {readable(needed)}, more than the {readable(limit)} of host memory it may "
        f"take: it goes to a temporary file in {disk.folder}; --recall-bits 4 takes a quarter, "
        "--recall-limit sets another limit"
    ]


def _written(store: HostKVStore, needed: int) -> int:
    if store.on_disk and store.bits is None:
        # Layers with room stay; those that grow are copied, one at a time.
        more = needed - store.nbytes
        return more + needed // len(store.layers) if more > 0 else 0
    return needed
