"""Checkpoints in a saved conversation, with the layers and states that they hold: where neither its
cache nor its host store can be cut back to any number of tokens."""

from collections.abc import Iterable

from torch import Tensor

from kvlite.cache.layer import Mark
from kvlite.cache.snapshot import LayerReader, LayerWriter, Plain, Source
from kvlite.cache.sound import require
from kvlite.conversation.checkpoint import Checkpoint, LayerState, bytes_of
from kvlite.conversation.context import Context
from kvlite.conversation.ways_back import checkpoint_at, densest
from kvlite.model.load import LoadedModel
from kvlite.model.recurrent_states import require_states
from kvlite.offload.kv.checkpoint import checkpoint_from, checkpoint_parts
from kvlite.offload.kv.store import HOST, HostKVStore


def checkpoints_to_save(context: Context, most: int) -> list[Checkpoint] | None:
    """Those that let a conversation be cut back without reading again, in at most so many bytes;
    None if it can be cut back anyway."""
    if checkpoint_at(context, len(context.token_ids)) is not None:
        return None
    held = [each for each in context.checkpoints if each.seen and _is_plain(each)]
    while len(held) > 1 and bytes_of(held) > most:
        held.remove(densest(held))
    return held if bytes_of(held) <= most else []


def plain_checkpoints(held: Iterable[Checkpoint]) -> tuple[dict[str, Tensor], list[Plain]]:
    """Take checkpoints apart."""
    tensors, plain = dict[str, Tensor](), list[Plain]()
    for number, each in enumerate(held):
        parts = LayerWriter(f"checkpoint{number}")
        store = None if each.store is None else checkpoint_parts(each.store, parts)
        layers = [_plain_layer(f"{at}", state, parts) for at, state in enumerate(each.layers)]
        plain.append(
            {
                "seen": each.seen,
                "pending": each.pending_ids,
                "noted": list(each.notes),
                "rehearsed": each.reconstructed,
                "layers": layers,
                "states": parts.states(each.states),
                "tier": store,
                "objects": parts.objects,
            }
        )
        tensors |= parts.tensors
    return tensors, plain


def checkpoints_from(
    plain: Iterable[Plain],
    source: Source,
    store: HostKVStore | None,
    tokens: int,
    model: LoadedModel,
) -> list[Checkpoint]:
    """Put the checkpoints of a conversation of so many tokens together again; without its `store`,
    those that need none. Raises SnapshotError if they are damaged."""
    made = (_checkpoint_from(each, source, store, tokens, model) for each in plain)
    return [each for each in made if not each.lost]


def _is_plain(made: Checkpoint) -> bool:
    marks = (each.mark for each in made.layers)
    return not made.lost and all(each is None or each.rows is None for each in marks)


def _plain_layer(name: str, state: LayerState, parts: LayerWriter) -> int | Plain:
    if state.copy is not None:
        return parts.layer(name, state.copy)
    assert state.mark is not None
    return state.mark.used


def _checkpoint_from(
    plain: Plain, source: Source, store: HostKVStore | None, tokens: int, model: LoadedModel
) -> Checkpoint:
    seen, pending, shape = plain["seen"], plain["pending"], model.shape
    require(type(seen) is int and 0 < seen <= tokens)
    require(all(type(each) is int and 0 <= each < shape.vocab for each in pending))
    reader = LayerReader(source, plain["objects"], HOST, model.dtype, seen + 1)
    made = Checkpoint(seen, pending, tuple(map(str, plain["noted"])), plain["rehearsed"])
    require(len(plain["layers"]) in (0, shape.layers))
    for each, size in zip(plain["layers"], shape.kv_sizes, strict=bool(plain["layers"])):
        if type(each) is int:
            made.layers.append(LayerState(Mark(each, None, -1)))
        else:
            made.layers.append(LayerState(copy=reader.layer(each, size)))
    made.states = reader.states(plain["states"], lambda _: HOST)
    require_states(made.states, shape, model.dtype)
    if plain["tier"] is not None and store is not None:
        made.store = checkpoint_from(plain["tier"], store, reader, model)
    made.lost = plain["tier"] is not None and store is None
    return made
