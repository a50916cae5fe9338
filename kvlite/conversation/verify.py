"""An answer checked: the last message answered once more, from a cache that drops nothing.

All of it happens beside the conversation, which is only looked at: stopped, failed or left in the
middle, it stands as it did.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Literal

import torch

from kvlite.cache import KVCache, LayerCache
from kvlite.cache.copying import copied
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.context import Context
from kvlite.conversation.history import Branch
from kvlite.conversation.metrics import Piece
from kvlite.engine.callbacks import Callbacks
from kvlite.memory.oom import CHUNK, HIDDEN, OOMActions, OOMPolicy, T
from kvlite.methods.engine_config import EngineConfig
from kvlite.offload import HostKVStore

_WHOLE = {
    "method": "full",
    "budget": "100%",
    "kv_bits": "16",
    "recall": "off",
    "never_lossy": True,
}

Run = tuple[Literal["both", "one", "other"], str]


@dataclass(frozen=True)
class Answered:
    """A conversation whose last answer is checked.

    Attributes:
        context: what was read, and is not changed.
        branch: the one it is on.
        prompt: the last message as it was read, if that is known.
        config: of the conversation: by this it was read.
    """

    context: Context
    branch: Branch
    prompt: Checkpoint | None
    config: EngineConfig

    @property
    def drawn(self) -> EngineConfig:
        """By which the last answer was drawn, as far as that is known."""
        turn = self.context.turn
        return self.config if turn is None or self.prompt is None else turn.config


def checked(told: Answered, callbacks: Callbacks, **settings: object) -> Iterator[Piece]:
    """Answer the last message again from all that was read before it, drawn as the former answer.

    What the recall store or the cache has of that is copied, and just one token is computed;
    where they lack any of it, all is read again, and the callbacks are told so first.

    Args:
        settings: override those of the drawing.

    Raises:
        SettingError: nothing has been said, or a setting is unknown or out of range.
        OutOfMemory: it takes more memory than there is.
        Stopped: it was cancelled while it was read.
    """
    told.branch.require(len(told.branch.nodes))
    assert told.branch.tip is not None
    drawn = told.drawn.settings.after_load(settings)
    chosen = EngineConfig.from_settings(drawn.replace(_WHOLE))
    own = Context(told.context.model)
    own.oom_policy = _Careful(own.model.device)
    ids = told.context.token_ids[: told.branch.tip.prompt_end]
    found = own.oom_policy.run(partial(_held, told, len(ids) - 1), {})
    if found is not None:
        own.cache, own.token_ids = found, ids[:-1]
    else:
        callbacks.say(f"{len(ids):,} tokens are read again")
    own.notes = tuple(_notes(told, copied=found is not None))
    turn = own.next_turn(ids[len(own.token_ids) :], chosen)
    for note in own.notes:
        callbacks.say(note)
    own.read(turn, callbacks)
    yield from own.answer(turn, ignore_eos=False, cancel=callbacks.cancel)


class _Careful(OOMPolicy):
    """Gives up only what costs no quality, and leaves no trace in the model."""

    def run(self, work: Callable[[], T], oom_actions: OOMActions) -> T:
        return super().run(work, _traceless(oom_actions))

    def reserve_for(
        self, storage: int, workspace: Callable[[], int], oom_actions: OOMActions
    ) -> None:
        super().reserve_for(storage, workspace, _traceless(oom_actions))


def _traceless(oom_actions: OOMActions) -> OOMActions:
    return {name: oom_actions[name] for name in (CHUNK, HIDDEN) if name in oom_actions}


def _notes(told: Answered, *, copied: bool) -> Iterator[str]:
    """Why the answer is not from all that was ever read, as it was."""
    if told.branch.compacted:
        yield (
            "what was forgotten when the conversation outgrew the model's context is not in this "
            "answer either"
        )
    store = told.context.store
    if copied and store is not None and _rounded(store):
        yield (
            f"what was read is kept in {store.bits} bits to be recalled, and this answer is made "
            "from that: --recall-bits 16 keeps it as it was"
        )


def _rounded(store: HostKVStore) -> bool:
    return any(layer.head_group.segment is not None for layer in store.layers)


@torch.inference_mode()
def _held(told: Answered, seen: int) -> KVCache | None:
    """A cache of its own with all of the first `seen` tokens; None if nothing has them, exact."""
    context = told.context
    if not told.config.method.prefilling.exact or not seen:
        return None
    windows = context.model.shape.windows
    layers = context.model.empty_cache().layers
    for index, window in enumerate(windows):
        first = 0 if window is None else max(0, seen + 1 - window)
        givers = _givers(told, index)
        made = next((cut for each in givers if (cut := _cut(each, first, seen))), None)
        if made is None:
            return None
        layers[index] = made
    return KVCache(layers, seen, context.cache.reconstructed)


def _givers(told: Answered, index: int) -> Iterator[LayerCache]:
    """Copies on the device of what may have all that a layer read: the cache, what it was before
    the answer, and the host store."""
    device, store = told.context.model.device, told.context.store
    live = told.context.cache.layers[index]
    if _plain(live):
        yield live.resized([live.head_groups[0].used])
    kept = told.prompt.layers[index].copy if told.prompt and told.prompt.layers else None
    if kept is not None and _plain(kept):
        (on_device,) = copied([kept], device)
        yield on_device.resized([on_device.head_groups[0].used])
    if store is not None and store.begun:
        yield store.restored(index, 0, device)


def _plain(layer: LayerCache) -> bool:
    """Whether all heads hold equally many entries, as they were computed."""
    return (
        len(layer.head_groups) == 1
        and not layer.head_alias
        and layer.head_groups[0].segment is None
    )


def _cut(layer: LayerCache, first: int, end: int) -> LayerCache | None:
    """A layer in order without what came later, if it has every position from `first` on."""
    (head_group,) = layer.head_groups
    positions = head_group.residual_positions[:, :, : head_group.used]
    used = int((positions[0, 0] < end).sum())
    if used < end - first:
        return None
    wanted = torch.arange(first, end, dtype=torch.int32, device=positions.device)
    if not bool((positions[:, :, used - len(wanted) : used] == wanted).all()):
        return None
    head_group.used = used
    return layer


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
        if end > start:
            runs.append(("one", "".join(ours[start:end])))
        if stop > begin:
            runs.append(("other", "".join(theirs[begin:stop])))
    return runs


def _words(text: str) -> list[str]:
    """Words, each with the white space behind it; the first also with what is before it."""
    return [word for word in re.findall(r"^\s*\S*\s*|\S+\s*", text) if word]
