"""What reading can do without when memory runs out, before and beside what giving.py offers."""

from typing import Protocol

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache
from kvlite.cache.layer import Mark
from kvlite.engine.oom_actions import Holdings, Shelf, offers
from kvlite.engine.reconstruct import Repetition
from kvlite.memory.oom import CHUNK, HIDDEN, Ladder, Offers
from kvlite.methods.layer_policy import Rule
from kvlite.model.load import LoadedModel
from kvlite.offload import Tier

SHORTEST_CHUNK = 16


class Reads(Protocol):
    """A reading, as far as it is looked at here."""

    model: LoadedModel
    cache: KVCache
    tier: Tier | None
    layers: list[LayerCache]
    rules: list[Rule]
    marks: dict[int, list[Mark]]
    hidden: Tensor
    chunk: int
    end: int
    repetition: Repetition | None


def reading_offers(reading: Reads) -> Offers:
    """What can be given up while reading. It refers to the reading, which must not hold it."""
    return {
        CHUNK: lambda: _halve_chunk(reading),
        HIDDEN: lambda: _hidden_to_host(reading),
        **offers(reading.model, lambda: _holdings(reading)),
    }


def foresee(reading: Reads, index: int, ladder: Ladder) -> None:
    """Before a layer: is there memory for all that it will hold, and for a chunk?"""
    shape, itemsize = reading.model.shape, reading.model.dtype.itemsize
    length = reading.hidden.shape[1]
    if reading.tier is not None and reading.tier.begun:
        held = length + reading.tier.layers[index].read
    else:
        held = length + max(used for _, used in reading.cache.layers[index].lines)
    storage = shape.kv_heads * held * shape.entry_bytes(itemsize)
    # A chunk's widest activations: queries to outputs, and the MLP's three.
    row = (3 * shape.intermediate + 4 * shape.hidden) * itemsize
    every = reading_offers(reading)
    given = {name: every[name] for name in (CHUNK, HIDDEN)}
    ladder.foresee(storage, lambda: row * min(reading.chunk, length), given)


def may_wait(model: LoadedModel, ladder: Ladder | None) -> bool:
    """Whether hidden states can wait in host memory, and do not yet."""
    return model.device.type != "cpu" and ladder is not None and not ladder.times(HIDDEN)


def embedded(model: LoadedModel, token_ids: Tensor, chunk: int, ladder: Ladder | None) -> Tensor:
    """Hidden states `(batch, n, hidden size)` of token ids `(batch, n)`, where they are to wait."""
    if ladder is None or not ladder.times(HIDDEN):
        return model.embed(token_ids)
    return torch.cat([model.embed(part).cpu() for part in token_ids.split(chunk, 1)], 1)


def halved(chunk: int, times: int = 1) -> int:
    """Tokens of a chunk that was halved so often; no fewer than 16, unless it had fewer."""
    return max(min(chunk, SHORTEST_CHUNK), chunk >> times)


def _halve_chunk(reading: Reads) -> bool:
    """Read in chunks half as long; False if they are short already."""
    chunk = min(reading.chunk, reading.hidden.shape[1])
    if chunk <= SHORTEST_CHUNK:
        return False
    reading.chunk = halved(chunk)
    if reading.repetition is not None:
        reading.repetition.chunk = min(reading.repetition.chunk, reading.chunk)
    return True


def _hidden_to_host(reading: Reads) -> bool:
    """Let hidden states wait in host memory; False if they do, or it is the device."""
    if reading.hidden.device.type == "cpu":
        return False
    reading.hidden = reading.hidden.cpu()
    if reading.repetition is not None:
        reading.repetition.to_host()
    return True


def _holdings(reading: Reads) -> Holdings:
    """What is held: layers that were read, and, of before, those that will be read on from or gone
    back to. A layer that is read in place stays as it is."""
    grown, every = frozenset(reading.marks), frozenset(range(len(reading.rules)))
    now = grown & {len(reading.layers)}
    shelves = [
        Shelf(reading.layers, uncut=grown),
        Shelf(reading.cache.layers, fixed=now, uncut=every),
    ]
    return Holdings(reading.model.shape, shelves, reading.rules, reading.end)
