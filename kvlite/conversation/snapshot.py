"""Conversations in files: saved whole or not at all, opened where the same model is.

The next answer after opening is that of the conversation that was saved. Anything else is refused
in a sentence: another model, a newer format, a file that was damaged or cut short.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvlite
from kvlite.cache import KVCache
from kvlite.cache.snapshot import Form, Parts, Plain, Whole, described, layer_of
from kvlite.cache.sound import require
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.conversation.file_info import WRONG, about_in, digest_of
from kvlite.conversation.history_file import history_from, plain_history
from kvlite.conversation.session_state import SessionState, TokenState
from kvlite.conversation.tensor_file import LIGHT, WHOLE, Progress, TensorFile, write_tensors
from kvlite.documents import Document
from kvlite.errors import ModelError, OutOfMemory, RecallError, SnapshotError
from kvlite.memory.free import free_bytes, is_oom
from kvlite.memory.oom import OOM_STEPS
from kvlite.model.identity import Identity
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore
from kvlite.offload.kv.disk import Disk
from kvlite.offload.kv.placement import place
from kvlite.offload.kv.serialize import PREFIX, store_of, store_parts

# What is up to whoever opens a file: which machine it is, and how much of it may be taken.
_OPENERS = (
    "model",
    "device",
    "weights",
    "vram",
    "stream",
    "chunk",
    "measure",
    "recall_limit",
    "never_lossy",
)


def save(
    path: Path,
    state: SessionState,
    model: LoadedModel,
    settings: Settings,
    progress: Progress | None = None,
    most: int | None = None,
    *,
    light: bool = False,
) -> int:
    """Write a conversation to a file; its bytes. What was there stays until all of it is written.

    Args:
        progress: told (bytes done, of how many).
        most: bytes it may have.
        light: leave out the cache and the host store, which are read again when it is opened. Of a
            conversation that was compacted they are written: reading would not give them back.

    Raises:
        SnapshotError: it cannot be written there, or would be larger.
    """
    light = light and not state.branch.compacted
    ahead = state.branch.prefilled_ids
    plain: Plain = {
        "kvlite": kvlite.__version__,
        "created": time.time(),
        "model": _whole_name(settings.model),
        "identity": asdict(_identity_of(model, path)),
        "settings": asdict(settings),
        "tokens": len(state.token_ids),
        "messages": len(state.branch.messages),
        "documents": [each.name for each in state.documents],
        "ahead": digest_of(state.documents) if ahead and state.documents else "",
        "pending": state.pending_ids,
        "noted": list(state.notes),
        "given_up": state.fallbacks,
    }
    tensors = dict[str, Tensor]()
    if light:
        plain["light"] = True
    else:
        tensors |= _cache_parts(state, plain)
    tensors["token_ids"] = torch.tensor(state.token_ids, dtype=torch.int32)
    tensors["ahead"] = torch.tensor(ahead, dtype=torch.int32)
    tensors["ways"] = _text(plain_history(state.branches, state.current, state.store))
    tensors["documents"] = _text([asdict(each) for each in state.documents])
    return write_tensors(path, plain, tensors, progress, most, LIGHT if light else WHOLE)


def _identity_of(model: LoadedModel, path: Path) -> Identity:
    """A model's identity, which its files tell.

    Raises:
        SnapshotError: they are gone, or cannot be read.
    """
    try:
        return Identity.of(model)
    except ModelError as error:
        raise SnapshotError(f"{path} is not written, what was there still is: {error}") from error


def _cache_parts(state: SessionState, plain: Plain) -> dict[str, Tensor]:
    """The tensors of the cache and the host store, which are described in what is said of the
    file."""
    parts = Parts("cache")
    layers = [described(parts, f"{index}", layer) for index, layer in enumerate(state.cache.layers)]
    plain["cache"] = {
        "seen": state.cache.seen,
        "rehearsed": state.cache.reconstructed,
        "writing": state.cache.writing,
        "objects": parts.objects,
        "layers": layers,
    }
    if state.store is None:
        return parts.tensors
    own, plain["tier"] = store_parts(state.store)
    return {**parts.tensors, **own.tensors}


class Snapshot:
    """A file that a conversation can be opened from.

    Attributes:
        about: what it says of itself.
    """

    def __init__(self, path: Path) -> None:
        """Open it and check what it says of itself.

        Raises:
            SnapshotError: it is none, a damaged one, or of a newer format.
        """
        self.file = TensorFile(path)
        try:
            self.about = about_in(self.file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def settings(self, own: Settings) -> Settings:
        """The conversation's settings, but for what is up to this machine.

        Args:
            own: those of the model that is loaded.

        Raises:
            SettingError: this version does not know one of its values.
        """
        known = {each.name for each in fields(Settings)} - {*_OPENERS}
        saved = {name: value for name, value in self.about.settings.items() if name in known}
        return own.replace(saved)

    def documents(self) -> tuple[Document, ...]:
        """The documents that were read.

        Raises:
            SnapshotError: the file is damaged.
        """
        with self._told():
            return tuple(map(_document, self._plain("documents")))

    def token_state(self, model: LoadedModel, progress: Progress | None = None) -> TokenState:
        """What any file has, and a light one nothing else; `read_again` makes the rest.

        Args:
            progress: told (bytes done, of how many).

        Raises:
            SnapshotError: the file is damaged, or of another model.
        """
        self.about.identity.require(Identity.of(model), self.about.path, self.about.model)
        self.file.progress = progress
        try:
            with self._told():
                found = self._token_state(model)
                history_from(found.history, None, model.shape.layers)
                return found
        finally:
            self.file.progress = None

    @torch.inference_mode()
    def state(
        self, model: LoadedModel, settings: Settings, progress: Progress | None = None
    ) -> SessionState:
        """What the conversation goes on from, on a model's device, if the file is not light.

        Args:
            settings: of the turns to come: they say where what is recalled goes, `--recall off`
                that it is not wanted.
            progress: told (bytes done, of how many).

        Raises:
            SnapshotError: the file is damaged, of another model, or there is no room for what is
                recalled.
            OutOfMemory: there is not enough for the rest.
        """
        self.about.identity.require(Identity.of(model), self.about.path, self.about.model)
        self.file.progress = progress
        failed = False
        try:
            with self._told():
                return self._state(model, settings)
        except Exception as error:
            if not is_oom(error):
                raise
            failed = True
        finally:
            self.file.progress = None
        assert failed
        free = readable(free_bytes(model.device))
        raise OutOfMemory(
            f"{self.about.path} takes {readable(self.about.nbytes)}, and {free} are free on "
            f"{model.device}: close other programs"
        )

    def _state(self, model: LoadedModel, settings: Settings) -> SessionState:
        found, notes = self._token_state(model), list[str]()
        cache, store = self._cache(model, len(found.token_ids)), None
        if "tier" in self.file.about and (settings.recall != "off" or not cache.entries_mean):
            store, notes = self._store(model, settings, len(found.token_ids))
        branches, current = history_from(found.history, store, model.shape.layers)
        branches[current].prefilled_ids = found.prefilled_ids
        return SessionState(
            cache=cache,
            store=store,
            token_ids=found.token_ids,
            branches=branches,
            current=current,
            documents=found.documents,
            pending_ids=found.pending_ids,
            notes=(*found.notes, *notes),
            fallbacks=found.fallbacks,
        )

    def _token_state(self, model: LoadedModel) -> TokenState:
        plain = self.file.about
        token_ids, ahead = self._ids("token_ids", model), self._ids("ahead", model)
        pending_ids, fallbacks = plain["pending"], plain["given_up"]
        require(all(type(token) is int for token in pending_ids))
        require({*fallbacks} <= {oom_step.name for oom_step in OOM_STEPS})
        require(token_ids[len(token_ids) - len(ahead) :] == ahead)
        return TokenState(
            token_ids=token_ids,
            history=self._plain("ways"),
            documents=self.documents(),
            pending_ids=pending_ids,
            prefilled_ids=ahead,
            notes=tuple(str(each) for each in plain["noted"]),
            fallbacks=fallbacks,
        )

    def _cache(self, model: LoadedModel, tokens: int) -> KVCache:
        plain, shape = self.file.about["cache"], model.shape
        require(len(plain["layers"]) == shape.layers and 0 <= plain["seen"] <= tokens)
        whole = Whole(self.file, plain["objects"], model.device)
        # A token that was being written when memory ran out is in some layers already.
        form = Form(shape.kv_heads, shape.head_dim, model.dtype, tokens + 1)
        layers = [layer_of(whole, each, form) for each in plain["layers"]]
        return KVCache(layers, plain["seen"], plain["rehearsed"], plain["writing"])

    def _store(
        self, model: LoadedModel, settings: Settings, tokens: int
    ) -> tuple[HostKVStore, list[str]]:
        """The host store, where the settings and the machine allow it to be; what the user is
        told."""
        plain = self.file.about["tier"]
        require(0 < plain["seen"] <= tokens)
        names = [name for name in self.file.names() if name.startswith(f"{PREFIX}.")]
        needed = sum(map(self.file.size, names))
        try:
            disk, spare, said = self._place(model, settings, needed)
            store = store_of(
                self.file, plain, model.shape, model.dtype, model.device, disk=disk, spare=spare
            )
        except RecallError as error:
            raise SnapshotError(
                f"{self.about.path} has {readable(needed)} to recall from, for which there is no "
                "room in memory or on disk (--recall, --recall-limit, KVLITE_CACHE): --recall off "
                "opens it without"
            ) from error
        return store, said

    def _place(
        self, model: LoadedModel, settings: Settings, needed: int
    ) -> tuple[Disk | None, bool, list[str]]:
        return place(settings, HostKVStore.empty(model.shape, model.dtype, None), needed)

    def _ids(self, name: str, model: LoadedModel) -> list[int]:
        held = self.file.new(name, torch.device("cpu"))
        require(held.dtype == torch.int32 and held.dim() == 1)
        ids: list[int] = held.tolist()
        require(not ids or (min(ids) >= 0 and max(ids) < model.shape.vocab))
        return ids

    def _plain(self, name: str) -> Any:
        held = self.file.new(name, torch.device("cpu"))
        return json.loads(held.numpy().tobytes())

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What is wrong with the file, in a sentence."""
        try:
            yield
        except SnapshotError as error:
            if str(self.about.path) in str(error):
                raise
            raise self.file.damaged(str(error)) from error
        except (RuntimeError, *WRONG) as error:
            if is_oom(error):
                raise
            raise self.file.damaged() from error


def _document(plain: Plain) -> Document:
    starts, not_read = tuple(plain["page_starts"]), tuple(map(str, plain.get("not_read", ())))
    return Document(str(plain["name"]), str(plain["text"]), starts, not_read)


def _whole_name(model: str) -> str:
    """A model's name as it is understood from any folder."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _text(plain: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
