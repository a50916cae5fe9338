"""What prefill can give up when memory runs out, in addition to `oom_actions`."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlite.engine.oom_actions import OOMState, ReducibleLayers, oom_actions
from kvlite.memory.oom import CHUNK, HIDDEN, OOMActions, OOMPolicy
from kvlite.model.load import LoadedModel

if TYPE_CHECKING:
    from kvlite.engine.prefill import Prefill

SHORTEST_CHUNK = 16
# Tokens of one for which others wait.
SHORT_CHUNK = 128


def prefill_oom_actions(run: "Prefill") -> OOMActions:
    """What can be given up while reading. It refers to the reading, which must not hold it."""
    return {
        CHUNK: lambda: _halve_chunk(run),
        HIDDEN: lambda: _hidden_to_host(run),
        **oom_actions(run.model, lambda: _oom_state(run)),
    }


def reserve_for(run: "Prefill", index: int, oom_policy: OOMPolicy) -> None:
    """Before a layer: is there memory for all that it will hold, and for a chunk?"""
    shape, itemsize = run.model.shape, run.model.dtype.itemsize
    length = run.hidden.shape[1]
    if run.store is not None and run.store.begun:
        held = length + run.store.layers[index].read
    else:
        held = length + max(used for _, used in run.cache.layers[index].lengths)
    size = shape.kv_sizes[index]
    storage = size.heads * held * size.entry_bytes(itemsize)
    # A chunk's widest activations: queries to outputs, and the MLP's three.
    row = (3 * shape.intermediate + 4 * shape.hidden) * itemsize
    every = prefill_oom_actions(run)
    given = {name: every[name] for name in (CHUNK, HIDDEN)}
    workspace, device = lambda: row * min(run.chunk, length), run.model.device_of(index)
    oom_policy.reserve_for(storage, workspace, given, device)


def may_wait(model: LoadedModel, oom_policy: OOMPolicy | None) -> bool:
    """Whether hidden states can wait in host memory, and do not yet."""
    return model.device.type != "cpu" and oom_policy is not None and not oom_policy.times(HIDDEN)


def embedded(
    model: LoadedModel, token_ids: Tensor, chunk: int, oom_policy: OOMPolicy | None
) -> Tensor:
    """Hidden states `(batch, n, hidden size)` of token ids `(batch, n)`, where they are to wait."""
    if oom_policy is None or not oom_policy.times(HIDDEN):
        return model.embed(token_ids)
    return torch.cat([model.embed(part).cpu() for part in token_ids.split(chunk, 1)], 1)


def halved(chunk: int, times: int = 1) -> int:
    """Tokens of a chunk that was halved so often; no fewer than 16, unless it had fewer."""
    return max(min(chunk, SHORTEST_CHUNK), chunk >> times)


def shorten(run: "Prefill", index: int) -> None:
    """Read layer `index` on in shorter chunks, unless they have a say in what is attended to."""
    if run.chunk > SHORT_CHUNK and run.policies[index].method.prefilling.columns is None:
        run.chunk = halved(run.chunk)


def _halve_chunk(run: "Prefill") -> bool:
    """Read in chunks half as long; False if they are short already."""
    chunk = min(run.chunk, run.hidden.shape[1])
    if chunk <= SHORTEST_CHUNK:
        return False
    run.chunk = halved(chunk)
    if run.reconstruction_pass is not None:
        run.reconstruction_pass.chunk = min(run.reconstruction_pass.chunk, run.chunk)
    return True


def _hidden_to_host(run: "Prefill") -> bool:
    """Let hidden states wait in host memory; False if they do, or it is the device."""
    if run.hidden.device.type == "cpu":
        return False
    run.hidden = run.hidden.cpu()
    if run.reconstruction_pass is not None:
        run.reconstruction_pass.to_host()
    return True


def _oom_state(run: "Prefill") -> OOMState:
    """What is held: layers that were read, and, of before, those that will be read on from or gone
    back to. A layer that is read in place stays as it is."""
    grown, every = frozenset(run.marks), frozenset(range(len(run.policies)))
    now = grown & {len(run.layers)}
    reducible = [
        ReducibleLayers(run.layers, uncut=grown),
        ReducibleLayers(run.cache.layers, fixed=now, uncut=every),
    ]
    return OOMState(run.model.shape, reducible, run.policies, run.end)
