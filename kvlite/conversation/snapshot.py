"""Saved conversations: written whole or not at all, opened with the same model.

The next answer after opening equals that of the conversation that was saved. Everything else is
refused with a sentence: another model, a newer format, a file that was damaged or cut short. Light
files leave out the cache and the host store; their tokens are read again.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import kvlite
from kvlite.cache import KVBits, KVCache
from kvlite.cache.bits import with_form
from kvlite.cache.snapshot import LayerReader, LayerWriter, Plain
from kvlite.cache.sound import require
from kvlite.config.checked_file import from_json, sound
from kvlite.config.settings import LOADING, Settings
from kvlite.config.units import readable
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.checkpoint_file import (
    checkpoints_from,
    checkpoints_to_save,
    plain_checkpoints,
)
from kvlite.conversation.context import Context
from kvlite.conversation.file_info import about_in, digest_of
from kvlite.conversation.history_file import history_from, plain_history
from kvlite.conversation.tensor_file import LIGHT, WHOLE, TensorFile, write_tensors
from kvlite.documents import Document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks, Progress
from kvlite.errors import ModelError, OutOfMemory, RecallError, SnapshotError
from kvlite.memory.free import is_oom, with_free
from kvlite.memory.oom import OOM_STEPS
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.identity import Identity
from kvlite.model.load import LoadedModel
from kvlite.model.recurrent_states import require_states
from kvlite.offload import HostKVStore
from kvlite.offload.kv.checkpoint import PREFIX, HostKVCheckpoint, fill_store, store_parts
from kvlite.offload.kv.placement import place

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation

# Checkpoints may take so many times the bytes of cache and host store.
_CHECKPOINTS = 4
# Decided by whoever opens a file: the machine, and how much of it may be used.
_OPENERS = {*LOADING, "chunk", "measure", "recall_limit", "never_lossy"} - {"chat_template"}


def save(
    path: Path,
    talk: "Conversation",
    progress: Progress | None = None,
    most: int | None = None,
    *,
    light: bool = False,
) -> int:
    """Write a conversation to a file; returns its bytes. An existing file stays until the new one
    is complete.

    Args:
        progress: called with (bytes done, bytes in all).
        most: the largest size allowed, in bytes.
        light: leave out the cache and the host store. A compacted conversation is saved whole
            anyway: reading it again would not give the same.

    Raises:
        SnapshotError: it cannot be written there, or would be too large.
        InterruptedCacheError: a decode step was interrupted; nothing can go on from that.
    """
    context, branch = talk.context, talk.history.branch
    light = light and not branch.compacted
    if not light:
        context.end_step(talk.config)
        if context.store is None:
            context.cache.require_whole()
    ahead = branch.prefilled_ids
    plain: Plain = {
        "kvlite": kvlite.__version__,
        "created": time.time(),
        "model": _whole_name(talk.settings.model),
        "identity": asdict(_identity_of(talk.model, path)),
        "settings": asdict(talk.settings),
        "tokens": len(context.token_ids),
        "messages": len(branch.messages),
        "documents": [each.name for each in talk.documents],
        "ahead": digest_of(talk.documents) if ahead and talk.documents else "",
        "pending": context.pending_ids,
        "noted": list(context.notes),
        "given_up": context.oom_policy.taken,
    }
    tensors = dict[str, Tensor]()
    if light:
        plain["light"] = True
    else:
        tensors |= _cache_parts(context, plain)
        if not any(each.nodes for each in talk.history.branches):
            most_of_them = _CHECKPOINTS * sum(each.nbytes for each in tensors.values())
            if (held := checkpoints_to_save(context, most_of_them)) is not None:
                parts, plain["checkpoints"] = plain_checkpoints(held)
                tensors |= parts
    tensors["token_ids"] = torch.tensor(context.token_ids, dtype=torch.int32)
    tensors["ahead"] = torch.tensor(ahead, dtype=torch.int32)
    tensors["ways"] = _text(
        plain_history(talk.history.branches, talk.history.current, context.store)
    )
    tensors["documents"] = _text([asdict(each) for each in talk.documents])
    return write_tensors(path, plain, tensors, progress, most, LIGHT if light else WHOLE)


def _identity_of(model: LoadedModel, path: Path) -> Identity:
    try:
        return Identity.of(model)
    except ModelError as error:
        raise SnapshotError(f"{path} is not written, what was there still is: {error}") from error


def _cache_parts(context: Context, plain: Plain) -> dict[str, Tensor]:
    cache, parts = context.cache, LayerWriter("cache")
    layers = [parts.layer(f"{index}", layer) for index, layer in enumerate(cache.layers)]
    plain["cache"] = {
        "seen": cache.seen,
        "rehearsed": cache.reconstructed,
        "writing": cache.writing,
        "objects": parts.objects,
        "layers": layers,
        "states": parts.states(cache.states),
    }
    if context.store is None:
        return parts.tensors
    tensors, plain["tier"] = store_parts(context.store)
    return {**parts.tensors, **tensors}


class Snapshot(TensorFile):
    """A saved conversation, open for reading; `about` describes it."""

    def __init__(self, path: Path) -> None:
        """Open it and check its header. Raises SnapshotError if it is not a snapshot, damaged, or
        of a newer format."""
        super().__init__(path)
        try:
            self.about = about_in(self)
        except BaseException:
            self.close()
            raise

    def settings(self, own: Settings) -> Settings:
        """The conversation's settings; what depends on the machine is taken from `own`. Raises
        SettingError if this version does not know one of the values."""
        known = {each.name for each in fields(Settings)} - _OPENERS
        saved = {name: value for name, value in self.about.settings.items() if name in known}
        return own.replace(saved)

    def documents(self) -> tuple[Document, ...]:
        """The documents that were read. Raises SnapshotError if the file is damaged."""
        with self._damage_named():
            return tuple(map(Document.from_plain, self._json("documents")))

    def history(self) -> Plain:
        """What was said on all branches, as JSON values. Raises SnapshotError if the file is
        damaged."""
        with self._damage_named():
            plain = self._json("ways")
            history_from(plain, None, 0)
            return dict(plain)

    def known_ids(self, model: LoadedModel) -> list[int]:
        """All tokens that were read and generated. Raises SnapshotError if the file is damaged or
        of another model."""
        self.about.identity.require(Identity.of(model), self.path, self.about.model)
        with self._damage_named():
            return [*self._ids("token_ids", model), *map(int, self.values["pending"])]

    def restore(
        self,
        talk: "Conversation",
        progress: Progress | None = None,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        """Let a new conversation go on from the file, by its own settings: they say where the host
        store goes, and `--recall off` leaves it out. After an error, do not use the conversation.

        Args:
            progress: called with (bytes read, bytes in all).
            callbacks: follow the reading of a light file.

        Raises:
            SnapshotError: the file is damaged or of another model, or there is no room for the
                host store.
            OutOfMemory: there is not enough for the rest.
            Stopped, ContextError, SettingError: from reading a light file.
        """
        model, plain, light = talk.model, self.values, self.about.light
        self.about.identity.require(Identity.of(model), self.path, self.about.model)
        cache, store, notes = model.empty_cache(), None, list[str]()
        self.progress = progress
        failed = False
        try:
            with self._damage_named(), torch.inference_mode():
                token_ids, ahead = self._ids("token_ids", model), self._ids("ahead", model)
                pending_ids, fallbacks = plain["pending"], plain["given_up"]
                require(token_ids[len(token_ids) - len(ahead) :] == ahead)
                require(all(type(token) is int for token in pending_ids))
                require({*fallbacks} <= {oom_step.name for oom_step in OOM_STEPS})
                history, documents = self._json("ways"), self.documents()
                history_from(history, None, model.shape.layers)  # checks it before anything is read
                if not light:
                    cache, store, notes = self._caches(model, talk.config, len(token_ids))
                held = list[Checkpoint]()
                if (saved := plain.get("checkpoints")) is not None:
                    held = checkpoints_from(saved, self, store, len(token_ids), model)
                noted = (*map(str, plain["noted"]), *notes)
        except Exception as error:
            if not is_oom(error):
                raise
            failed = True
        finally:
            self.progress = None
        if failed:
            where = with_free(model.all_devices)
            raise OutOfMemory(
                f"{self.path} takes {readable(self.nbytes)}, too much for {where}: "
                "close other programs"
            )
        talk.context.resume(cache, store, token_ids, pending_ids, noted, fallbacks)
        if light:
            branches, current = history_from(history, None, model.shape.layers)
            read_again(talk, branches[current].prefill_boundaries, callbacks)
            store = _plain_store(talk.store)
        talk.documents = documents
        branches, current = history_from(history, store, model.shape.layers)
        branches[current].prefilled_ids = ahead
        talk.history.resume(branches, current)
        talk.context.checkpoints += held

    def _caches(
        self, model: LoadedModel, config: EngineConfig, tokens: int
    ) -> tuple[KVCache, HostKVStore | None, list[str]]:
        plain, shape = self.values["cache"], model.shape
        require(len(plain["layers"]) == shape.layers and 0 <= plain["seen"] <= tokens)
        # A token that was being written when memory ran out is in some layers already.
        readers = {
            each: LayerReader(self, plain["objects"], each, model.dtype, tokens + 1)
            for each in {*model.devices}
        }
        parts = zip(model.devices, plain["layers"], shape.kv_sizes, strict=True)
        layers = [readers[device].layer(each, size) for device, each, size in parts]
        states = readers[model.devices[0]].states(plain.get("states", {}), model.device_of)
        require_states(states, shape, model.dtype)
        cache = KVCache(layers, plain["seen"], plain["rehearsed"], plain["writing"], states)
        recalls = config.settings.recall != "off"
        if "tier" in self.values and (recalls or not cache.entries_mean):
            return cache, *self._store(model, config, tokens)
        return cache, None, []

    def _store(
        self, model: LoadedModel, config: EngineConfig, tokens: int
    ) -> tuple[HostKVStore, list[str]]:
        plain = self.values["tier"]
        require(0 < plain["seen"] <= tokens)
        needed = self.size(f"{PREFIX}.")
        bits = None if plain["bits"] is None else KVBits(**with_form(plain["bits"]))
        store = HostKVStore.empty(model.shape, model.dtype, bits)
        try:
            said = place(config, store, needed)
            fill_store(store, self, plain, model)
        except RecallError as error:
            raise SnapshotError(
                f"{self.path} has {readable(needed)} to recall from, for which there is no "
                "room in memory or on disk (--recall, --recall-limit, KVLITE_CACHE): --recall off "
                "opens it without"
            ) from error
        return store, said

    def _ids(self, name: str, model: LoadedModel) -> list[int]:
        held = self.new(name, torch.device("cpu"))
        require(held.dtype == torch.int32 and held.dim() == 1)
        ids: list[int] = held.tolist()
        require(not ids or (min(ids) >= 0 and max(ids) < model.shape.vocab))
        return ids

    def _json(self, name: str) -> Any:
        held = self.new(name, torch.device("cpu"))
        return from_json(held.numpy().tobytes())

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            with sound(lambda _: self.damaged()):
                yield
        except SnapshotError as error:
            if str(self.path) in str(error):
                raise
            raise self.damaged(str(error)) from error
        except RuntimeError as error:
            if is_oom(error):
                raise
            raise self.damaged() from error


def read_again(talk: "Conversation", parts: Sequence[int], callbacks: Callbacks) -> None:
    """Read the tokens that a conversation has without their cache, in the parts that end at these
    counts, but all by the present settings. `callbacks.progress` is called with tokens, of all
    parts together."""
    context, ids = talk.context, talk.token_ids
    boundaries = [each for each in parts if each <= len(ids)]
    end = Checkpoint(len(ids), context.pending_ids, context.notes, 0, lost=True)
    followed = _over_all(callbacks, context, boundaries, len(ids))
    context.seek(ids, end, (), boundaries, talk.config, followed)
    context.told, context.ahead = set(), (0, 0.0)  # as none of this is for the next answer
    if callbacks.progress is not None and ids:
        callbacks.progress(len(ids), len(ids))  # the last answer may be left to the next turn


def _plain_store(store: HostKVStore | None) -> HostKVStore | None:
    # A file names moments by their number of tokens alone.
    return store if store is not None and store.begun and HostKVCheckpoint(store).plain else None


def _over_all(
    callbacks: Callbacks, context: Context, boundaries: list[int], total: int
) -> Callbacks:
    """The same callbacks, with the progress of one part counted in tokens of all."""
    told = callbacks.progress
    if told is None:
        return callbacks

    def progress(done: int, of: int) -> None:
        start = len(context.token_ids)
        end = next((each for each in boundaries if each > start), total)
        told(start + (end - start) * done // of, total)

    return replace(callbacks, progress=progress)


def _whole_name(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _text(plain: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
