"""Checkpoints in a saved conversation, with the layers and states that they hold: where neither its
cache nor its host store can be cut back to any number of tokens."""

from collections.abc import Iterable

from torch import Tensor

from kvlite.cache.layer import LayerCache, Mark
from kvlite.cache.snapshot import LayerReader, LayerWriter, Plain, Source
from kvlite.cache.sound import require
from kvlite.conversation.checkpoint import Checkpoint, LayerState, bytes_of
from kvlite.conversation.context import Context
from kvlite.conversation.history_file import moment_from, plain_moment
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


def plain_checkpoints(held: Iterable[Checkpoint]) -> tuple[dict[str, Tensor], Plain]:
    """Take checkpoints apart; layers that they share are written once."""
    copies, numbers, layers = LayerWriter("copies"), dict[int, int](), list[Plain]()
    tensors, plain = copies.tensors, list[Plain]()
    for number, each in enumerate(held):
        for index, copy in enumerate(state.copy for state in each.layers):
            if copy is not None and id(copy) not in numbers:
                numbers[id(copy)] = len(layers)
                layers.append({"of": index, "layer": copies.layer(f"{len(layers)}", copy)})
        parts = LayerWriter(f"checkpoint{number}")
        plain.append(
            {
                **plain_moment(each),
                "layers": [
                    [None if state.mark is None else state.mark.used, numbers.get(id(state.copy))]
                    for state in each.layers
                ],
                "states": parts.states(each.states),
                "tier": None if each.store is None else checkpoint_parts(each.store, parts),
                "objects": parts.objects,
            }
        )
        tensors |= parts.tensors
    return tensors, {"copies": layers, "objects": copies.objects, "held": plain}


def checkpoints_from(
    plain: Plain, source: Source, store: HostKVStore | None, tokens: int, model: LoadedModel
) -> list[Checkpoint]:
    """Put the checkpoints of a conversation of so many tokens together again; without its `store`,
    those that need none. Raises SnapshotError if they are damaged."""
    reader = LayerReader(source, plain["objects"], HOST, model.dtype, tokens + 1)
    sizes = model.shape.kv_sizes
    copies = [reader.layer(each["layer"], sizes[each["of"]]) for each in plain["copies"]]
    held = [each for each in plain["held"] if each["tier"] is None or store is not None]
    made = [_checkpoint_from(each, copies, source, store, model) for each in held]
    require(all(0 < each.seen <= tokens for each in made))
    return made


def _is_plain(made: Checkpoint) -> bool:
    marks = (each.mark for each in made.layers)
    return not made.lost and all(each is None or each.rows is None for each in marks)


def _checkpoint_from(
    plain: Plain,
    copies: list[LayerCache],
    source: Source,
    store: HostKVStore | None,
    model: LoadedModel,
) -> Checkpoint:
    made, shape = moment_from(plain), model.shape
    require(all(each < shape.vocab for each in made.pending_ids))
    require(len(plain["layers"]) in (0, shape.layers))
    for used, number in plain["layers"]:
        require(number is not None or type(used) is int)
        require(used is None or 0 <= used <= made.seen)
        mark = None if used is None else Mark(used, None, -1)
        made.layers.append(LayerState(mark, None if number is None else copies[number]))
    reader = LayerReader(source, plain["objects"], HOST, model.dtype, made.seen + 1)
    made.states = reader.states(plain["states"], lambda _: HOST)
    require_states(made.states, shape, model.dtype)
    if plain["tier"] is not None and store is not None:
        made.store = checkpoint_from(plain["tier"], store, reader, model)
    return made
