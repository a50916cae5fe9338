"""Current memory use of a conversation: on its device, in host memory and on disk."""

import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import psutil
import torch

from kvlite.cache import KVCache
from kvlite.cache.segment import bytes_held
from kvlite.engine.callbacks import ReadingBytes
from kvlite.memory.device_budget import capped_bytes, several
from kvlite.memory.nvml import CardUse, card_use
from kvlite.model.load import LoadedModel
from kvlite.model.shape import ModelShape
from kvlite.offload import HostKVStore

FREE = "free"


@dataclass(frozen=True)
class Part:
    """Something that takes memory; `mine` if this program holds it."""

    name: str
    nbytes: int
    about: str = ""
    mine: bool = True


@dataclass(frozen=True)
class Place:
    """Memory of one kind.

    Attributes:
        short: VRAM, RAM or disk.
        parts: the uses of its bytes, in a fixed order; the last is free memory.
    """

    name: str
    short: str
    total: int
    parts: tuple[Part, ...]

    @property
    def free(self) -> int:
        """Unused bytes."""
        return self.parts[-1].nbytes

    @property
    def used(self) -> int:
        """Bytes that are not free."""
        return max(0, self.total - self.free)


@dataclass(frozen=True)
class Holding:
    """What a conversation holds now: on the model's device (weights first), in host memory, and in
    a file on disk, in `folder`."""

    device: tuple[Part, ...]
    host: tuple[Part, ...] = ()
    disk: Part | None = None
    folder: str = ""


def holding(
    model: LoadedModel,
    cache: KVCache | None = None,
    store: HostKVStore | None = None,
    checkpoints: int = 0,
    *,
    weights: Part | None = None,
    reading: ReadingBytes | None = None,
) -> Holding:
    """Weights, keys and values by kind of layer, the search index, and what is kept off the device.

    Args:
        cache: None where there is no conversation.
        checkpoints: bytes of host memory that checkpoints take.
        weights: from `weights_of`, if known; summing hundreds of tensors takes a while.
        reading: what a prefill in progress holds.
    """
    weights = weights or weights_of(model)
    beside, disk, folder = list[Part](), None, ""
    if store is not None and store.begun:
        disks = [layer.disk for layer in store.layers if layer.disk is not None]
        bits = "as the model has it" if store.bits is None else f"in {store.bits} bits"
        kept = Part("offloaded KV", store.nbytes, f"all {store.seen:,} tokens read, {bits}")
        if disks:
            disk, folder = kept, str(disks[0].folder)
        else:
            beside.append(kept)
    if checkpoints:
        beside.append(Part("checkpoints", checkpoints, "what undo, edit and branch go back to"))
    read = () if cache is None else _of_cache(model.shape, cache, store, reading)
    coming = () if reading is None else _of_reading(reading)
    return Holding((weights, *read, *coming), tuple(beside), disk, folder)


def _of_reading(reading: ReadingBytes) -> Iterator[Part]:
    yield Part("KV kept so far", reading.kept, "of layers that were read")
    yield Part("one layer's KV", reading.layer, "all that was read")
    yield Part("hidden states", reading.hidden, f"{reading.tokens:,} tokens")


def weights_of(model: LoadedModel) -> Part:
    """Bytes of a model's weights on its device."""
    return Part("weights", bytes_held(model.tensors()), model.weights.name)


def _of_cache(
    shape: ModelShape, cache: KVCache, store: HostKVStore | None, reading: ReadingBytes | None
) -> Iterator[Part]:
    if reading is None:
        yield from _by_kind(shape, cache)
    else:
        before = max(0, cache.nbytes - reading.within)
        yield Part("KV read before", before, f"{cache.seen:,} tokens")
    if cache.state_bytes:
        yield Part(
            "recurrent states", cache.state_bytes, f"{shape.recurrent_layers} layers, any length"
        )
    if store is not None and store.index_bytes:
        yield Part("search index", store.index_bytes, "finds what to fetch back")


def _by_kind(shape: ModelShape, cache: KVCache) -> Iterator[Part]:
    sliding = [index for index, window in enumerate(shape.windows) if window is not None]
    windowed = bytes_held(each for index in sliding for each in cache.layers[index].tensors)
    for name, indices, nbytes in (
        ("KV, full attention", shape.full_layers, cache.nbytes - windowed),
        ("KV, sliding windows", sliding, windowed),
    ):
        if indices:
            entries = sum(cache.layers[index].entries_mean for index in indices) / len(indices)
            about = f"{len(indices)} layers, {entries:,.0f} of {cache.seen:,} entries a head"
            yield Part(name, nbytes, about)


def places(
    device: torch.device, held: Holding, vram: str, cards: Sequence[torch.device] = ()
) -> list[Place]:
    """The device, or all `cards` together, then host memory and disk; `vram` as in `Settings`,
    which on a CPU limits live tensors."""
    elsewhere = [] if held.disk is None else [_disk(held.disk, held.folder)]
    if device.type == "cuda":
        return [_cards({device, *cards}, held.device), host(held.host), *elsewhere]
    capped = [] if capped_bytes(vram) is None else [_cap(vram, held.device)]
    return [*capped, host((*held.device, *held.host)), *elsewhere]


def _cap(vram: str, parts: tuple[Part, ...]) -> Place:
    total = capped_bytes(vram) or 0
    free = max(0, total - _sum(parts))
    return Place(
        f"what --vram {vram} allows tensors", "VRAM", total, (*parts, Part(FREE, free, mine=False))
    )


def _cards(devices: Collection[torch.device], parts: tuple[Part, ...]) -> Place:
    live, uses = sum(map(torch.cuda.memory_allocated, devices)), [*map(_use, devices)]
    others, held = sum(use.others for use in uses), sum(use.held for use in uses)
    rest = (
        Part("other tensors", max(0, live - _sum(parts)), "work in progress"),
        Part("allocator", max(0, held - live), "held by torch, not in use"),
        Part("others", others, "driver, display, other programs", False),
        Part(FREE, sum(use.free for use in uses), mine=False),
    )
    name = several(torch.cuda.get_device_properties(device).name for device in devices)
    return Place(name, "VRAM", sum(use.total for use in uses), (*parts, *rest))


def _use(device: torch.device) -> CardUse:
    use = card_use(device)
    if use is None:  # NVML is not available
        free, total = torch.cuda.mem_get_info(device)
        use = CardUse(total, total - free, torch.cuda.memory_reserved(device))
    return use


def host(parts: tuple[Part, ...]) -> Place:
    """Host memory, including the `parts` that this program is known to hold."""
    memory, mine = psutil.virtual_memory(), psutil.Process().memory_info().rss
    program = max(0, mine - _sum(parts))
    others = max(0, memory.total - memory.available - program - _sum(parts))
    rest = (
        Part("this program", program, "Python, torch, work in progress"),
        Part("others", others, "other programs, the system", False),
        Part(FREE, memory.available, mine=False),
    )
    return Place("host memory", "RAM", memory.total, (*parts, *rest))


def _disk(mine: Part, folder: str) -> Place:
    usage = shutil.disk_usage(folder)
    parts = (
        mine,
        Part("others", max(0, usage.total - usage.free - mine.nbytes), "other files", False),
        Part(FREE, usage.free, mine=False),
    )
    return Place(f"the disk of {folder}", "disk", usage.total, parts)


def _sum(parts: Sequence[Part]) -> int:
    return sum(part.nbytes for part in parts)
