"""Check an answer: the last message is answered again from a cache that drops nothing.

The conversation is only looked at: whether the check is stopped, fails or is left in the middle, it
does not change.
"""

import re
from collections.abc import Generator, Iterator
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from kvlite.cache import KVCache, LayerCache, Selection
from kvlite.cache.copying import copied
from kvlite.conversation.context import Context
from kvlite.conversation.metrics import Piece
from kvlite.engine.callbacks import Callbacks
from kvlite.memory.oom import CHUNK, HIDDEN

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation

_WHOLE = {
    "method": "full",
    "budget": "100%",
    "kv_bits": "16",
    "recall": "off",
    "never_lossy": True,
}

Run = tuple[Literal["both", "one", "other"], str]


def checked(
    talk: "Conversation", callbacks: Callbacks, **settings: object
) -> Generator[Piece, None, None]:
    """Answer the last message again from everything read before it, sampled like the former answer.

    What the cache or the host store has of that is copied, and only one token is computed. If they
    lack any of it, everything is read again, and `callbacks` are told so first.

    Args:
        settings: sampling settings to use instead.

    Raises:
        SettingError: nothing has been said, or a setting is unknown or out of range.
        OutOfMemory: it takes more memory than there is.
        Stopped: it was cancelled while reading.
    """
    talk.history.give_up_reading()
    context, branch, turn = talk.context, talk.history.branch, talk.context.turn
    branch.require(len(branch.nodes))
    assert branch.tip is not None
    drawn = talk.config if turn is None or talk.history.prompt is None else turn.config
    chosen = drawn.changed(drawn.settings.after_load(settings).replace(_WHOLE))
    own = Context(talk.model)
    own.oom_policy.allowed = CHUNK, HIDDEN  # which cost no quality, and leave the model as it is
    ids = context.token_ids[: branch.tip.prompt_end]
    found = own.oom_policy.run(partial(_held, talk, len(ids) - 1), {})
    if found is not None:
        own.cache, own.token_ids = found, ids[:-1]
    else:
        callbacks.say(f"{len(ids):,} tokens are read again")
    own.notes = tuple(_notes(talk, copied=found is not None))
    turn = own.next_turn(ids[len(own.token_ids) :], chosen)
    for note in own.notes:
        callbacks.say(note)
    own.read(turn, callbacks)
    yield from own.answer(turn, callbacks.cancel)


def _notes(talk: "Conversation", *, copied: bool) -> Iterator[str]:
    if talk.history.branch.compacted:
        yield (
            "what was forgotten when the conversation outgrew the model's context is not in this "
            "answer either"
        )
    store = talk.store
    if not copied or store is None:
        return
    if any(layer.head_group.segment is not None for layer in store.layers):
        yield (
            f"what was read is kept in {store.bits} bits to be recalled, and this answer is made "
            "from that: --recall-bits 16 keeps it as it was"
        )


@torch.inference_mode()
def _held(talk: "Conversation", seen: int) -> KVCache | None:
    # Recurrent layers have states of later tokens alone.
    recurrent = talk.model.shape.recurrent_layers > 0
    if not talk.config.method.prefilling.exact or not seen or recurrent:
        return None
    layers, shape = talk.model.empty_cache().layers, talk.model.shape
    for index, window in enumerate(shape.windows):
        seeing = seen + 1 if window is None else window.visible(seen)
        first = max(0, seen + 1 - seeing)
        givers = _givers(talk, index)
        made = next((cut for each in givers if (cut := _cut(each, first, seen))), None)
        if made is None:
            return None
        layers[index] = made
    return KVCache(layers, seen, talk.cache.reconstructed)


def _givers(talk: "Conversation", index: int) -> Iterator[LayerCache]:
    device, store, prompt = talk.model.device_of(index), talk.store, talk.history.prompt
    live = talk.cache.layers[index]
    if _plain(live):
        yield live.resized([live.head_groups[0].used])
    kept = prompt.layers[index].copy if prompt and prompt.layers else None
    if kept is not None and _plain(kept):
        (on_device,) = copied([kept], [device])
        yield on_device.resized([on_device.head_groups[0].used])
    if store is not None and store.begun:
        yield store.restored(index, 0, device)


def _plain(layer: LayerCache) -> bool:
    return layer.uniform and layer.head_groups[0].segment is None


def _cut(layer: LayerCache, first: int, end: int) -> LayerCache | None:
    (head_group,) = layer.head_groups
    positions = head_group.residual_positions[:, :, : head_group.used]
    used = int((positions[0, 0] < end).sum())
    if used < end - first:
        return None
    wanted = torch.arange(first, end, dtype=torch.int32, device=positions.device)
    if not bool((positions[:, :, used - len(wanted) : used] == wanted).all()):
        return None
    head_group.used = used
    slots = torch.arange(used - len(wanted), used, device=positions.device)
    kept = Selection(head_group, slots.expand(*positions.shape[:2], -1))
    return LayerCache.gathered([kept], [len(wanted)])


def difference(one: str, other: str) -> list[Run]:
    """Where two answers differ, by words: runs in order, each in "both" (as `one` has it) or in one
    of them alone, with the spaces that follow. White space alone is no difference."""
    ours, theirs = _words(one), _words(other)
    matcher = SequenceMatcher(
        None, [each.strip() for each in ours], [each.strip() for each in theirs], autojunk=False
    )
    runs: list[Run] = []
    for kind, start, end, begin, stop in matcher.get_opcodes():
        if kind == "equal":
            runs.append(("both", "".join(ours[start:end])))
            continue
        sides: list[Run] = [("one", "".join(ours[start:end]))]
        sides.append(("other", "".join(theirs[begin:stop])))
        runs += [side for side in sides if side[1]]
    return runs


def _words(text: str) -> list[str]:
    """Words, each with the white space behind it; the first also with what is before it."""
    return [word for word in re.findall(r"^\s*\S*\s*|\S+\s*", text) if word]
