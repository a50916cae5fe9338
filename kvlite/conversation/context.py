"""What a conversation has read, as tokens: its cache, its host store, and checkpoints."""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from threading import Event
from weakref import WeakMethod

import torch

from kvlite.cache import KVCache
from kvlite.cache.segment import bytes_held
from kvlite.conversation.checkpoint import (
    Checkpoint,
    bytes_of,
    capture,
    copy_out,
    everything,
    restored,
)
from kvlite.conversation.metrics import Piece
from kvlite.conversation.turn import Turn
from kvlite.conversation.turn_config import can_compact
from kvlite.conversation.what_is_kept import TurnPlan, keep_what_fits
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.shift import compacted
from kvlite.engine.slices import Slices, whole
from kvlite.errors import OutOfMemory, RecallError
from kvlite.memory.oom import OOMPolicy
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import can_recall, require_in_sight
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore


class Context:
    """Everything read and answered so far.

    Attributes:
        store: everything that was read, if turns recall.
        token_ids: every token in the cache, in order.
        turn: the last one.
        checkpoints: those that hold anything, the oldest first.
        notes: for the next answer, about what was read before it.
        ahead: for the next answer, how many tokens were read before it, and in how many seconds.
        told: all notes so far; some are said once.
        watches: whether turns log the queries that tell what their answers came from.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.cache = model.empty_cache()
        self.store: HostKVStore | None = None
        self.token_ids: list[int] = []
        self.turn: Turn | None = None
        self.oom_policy = OOMPolicy(model.device, model.cards)
        self.checkpoints: list[Checkpoint] = []
        self._pending_ids: list[int] = []
        self.notes: tuple[str, ...] = ()
        self.ahead = (0, 0.0)
        self.told: set[str] = set()
        self.watches = False
        self._answer: Generator[Piece] | None = None

    @property
    def pending_ids(self) -> list[int]:
        """Tokens of the last answer that are not in the cache."""
        return self._pending_ids if self.turn is None else self.turn.pending_ids

    def resume(
        self,
        cache: KVCache,
        store: HostKVStore | None,
        token_ids: list[int],
        pending_ids: list[int],
        notes: tuple[str, ...],
        fallbacks: list[str],
    ) -> None:
        """Go on from what was saved."""
        self.cache, self.store, self.token_ids = cache, store, token_ids
        self._pending_ids, self.notes, self.oom_policy.taken = pending_ids, notes, fallbacks

    def end_step(self, config: EngineConfig) -> None:
        """Finish a decode step for which there was no memory, unless the next turn reads its token
        from the host store anyway; let go of proposed tokens. Raises OutOfMemory if there is still
        not enough."""
        turn = self.turn
        if turn is not None and turn.speculation is not None:
            turn.speculation.leave()
        if turn is not None and (turn.store is None or self._store_for(config) is None):
            turn.finish_step()

    def next_turn(
        self,
        ids: list[int],
        config: EngineConfig,
        *,
        answers: bool = True,
        plan: TurnPlan | None = None,
    ) -> Turn:
        """A turn that reads `ids`, checked but not begun. Args and errors are those of `Turn`."""
        turn = Turn(self, ids, config, self._store_for(config), answers=answers, plan=plan)
        if turn.store is None and self.emptied:
            notes = turn.notes
            turn = Turn(self, [*self._fill(), *ids], config, answers=answers)
            turn.notes = tuple(dict.fromkeys([*notes, *turn.notes]))
        return turn

    @property
    def emptied(self) -> bool:
        """Whether only the host store has what was read."""
        return self.store is not None and self.store.begun and not self.cache.entries_mean

    def _fill(self) -> list[int]:
        # What the host store did not have of the last answer is read next.
        store = self.store
        assert store is not None
        work = partial(everything, self.model, self.cache, store)
        self.cache = self.oom_policy.run(work, {})
        again = self.token_ids[store.seen :]
        self.token_ids = self.token_ids[: store.seen]
        self.store, self._pending_ids = None, [*again, *self._pending_ids]
        self._forget(0)
        return again

    def outgrows(self, count: int, config: EngineConfig, *, answers: bool) -> bool:
        """Whether `count` tokens and an answer as planned only fit the model's trained context if
        the cache is compacted."""
        limit = self.model.shape.max_context
        planned = config.settings.planned_tokens if answers else 0
        grown = self.cache.seen + count + min(planned, limit // 4) > limit
        return grown and can_compact(count, planned, limit)

    def compact(self) -> list[int]:
        """Shift the entries of the cache to the first positions, at most half of the model's
        trained context, and forget all else. Returns tokens of the last answer to read next; raises
        SettingError if the model's rotations do not allow it, OutOfMemory if memory is short."""
        self._close()
        again = self._fill() if self.emptied else []
        half = self.model.shape.max_context // 2
        self.cache = self.oom_policy.run(partial(compacted, self.model, self.cache, half), {})
        self.notes = (
            *self.notes,
            f"the conversation outgrew the {self.model.shape.max_context:,} tokens that this model "
            f"was trained for: it goes on with the {self.cache.seen:,} that the cache held, the "
            "rest is forgotten",
        )
        self._pending_ids, self.store, self.turn = self.pending_ids, None, None
        self.token_ids = self.token_ids[-self.cache.seen :]
        self._forget(0)
        return again

    def read_in_slices(self, turn: Turn, callbacks: Callbacks) -> Slices[None]:
        """Read a turn. If it has no answer, its notes and its time go to the next one that has."""
        self._close()
        if callbacks.planned is not None:
            gave_up = turn.turn_config != turn.everything
            callbacks.planned(turn.wanted)
            if gave_up:  # there may be room now
                keep_what_fits(turn)
        if turn.begins_to_drop:
            self._move_out(turn)
        gives_back = turn.store is not None and turn.store.bits is None
        if turn.turn_config.loses and not gives_back:
            self._copy_out(turn.config)
        self.oom_policy.never_lossy = turn.settings.never_lossy
        self.oom_policy.tell = _telling(WeakMethod(turn.note_fallback))
        yield from turn.read(callbacks)
        self.turn = turn
        turn.notes = tuple(dict.fromkeys([*self.notes, *turn.notes]))
        self.notes = () if turn.answers else turn.notes
        turn.ahead, self.ahead = self.ahead, (0, 0.0)
        if not turn.answers:
            tokens, seconds = turn.ahead
            self.ahead = tokens + len(turn.ids), seconds + turn.run_stats.read_s
        self.told.update(turn.notes)
        if turn.store is not None or not turn.config.ignores_recall:
            self.store = turn.store

    read = whole(read_in_slices)

    def _move_out(self, turn: Turn) -> None:
        """Move a cache that is whole to the host store, so that it is not on the device twice while
        a turn cuts it. Where the store has no room for it, it is cut where it is."""
        store = turn.store
        assert store is not None
        held = bytes_held(chain(self.model.tensors(), self.cache.tensors))
        with torch.inference_mode(), suppress(OutOfMemory, RecallError):
            self.oom_policy.run(partial(store.begin, self.cache), {})
            self.cache.layers = self.model.empty_cache().layers
            self.store = store
            keep_what_fits(turn)
            phases = turn.run_stats.planned_phases
            if phases:
                phases["read"] = max(held, phases["read"])

    def answer(
        self, turn: Turn, cancel: Event | None, *, in_words: bool = True, ignore_eos: bool = False
    ) -> Generator[Piece]:
        """Answer a turn that was read. A new turn ends the answer."""
        self._answer = turn.answer(cancel, in_words=in_words, ignore_eos=ignore_eos)
        return self._answer

    def checkpoint(self, config: EngineConfig, *, answering: bool = False) -> Checkpoint:
        """A checkpoint to read on from or, if `answering`, of the cache before its answer. It is
        `lost` if there is no memory for it."""
        self._close()
        cache, pending_ids = self.cache, [*self.pending_ids]
        made = Checkpoint(cache.seen, pending_ids, self.notes, cache.reconstructed)
        self._capture(made, None if answering else self.store, config)
        return made

    def _capture(self, made: Checkpoint, store: HostKVStore | None, config: EngineConfig) -> None:
        self.release(made)  # it stays lost if what follows is interrupted
        most = config.checkpoint_bytes
        work = partial(capture, made, self.model, self.cache, store, most)
        try:
            self.oom_policy.run(work, {})
        except OutOfMemory:
            made.release_memory()
        if not made.lost:
            self.checkpoints.append(made)
            self._keep_within(config)

    def _copy_out(self, config: EngineConfig) -> None:
        most = config.checkpoint_bytes
        try:
            self.oom_policy.run(partial(copy_out, self.checkpoints, self.cache, most), {})
        except OutOfMemory:
            self._forget(0)
        self.release()
        self._keep_within(config)

    def seek(
        self,
        ids: Sequence[int],
        end: Checkpoint,
        ancestors: Sequence[Checkpoint],
        boundaries: Sequence[int],
        config: EngineConfig,
        callbacks: Callbacks,
    ) -> None:
        """Be as if only `ids` had been read. What no checkpoint gives back is read again.

        Args:
            end: the checkpoint after `ids`; tried first if it holds anything.
            ancestors: checkpoints on the way there, the last first.
            boundaries: token counts at which readings ended; what is read again is read in the
                same parts.
            callbacks: told if something is read again.

        Raises:
            as `Turn`, from reading; the context then is at the last checkpoint that held anything.
        """
        self._close()
        known = next(at for at in (end, *ancestors, Checkpoint()) if self._restore(at, ids))
        if len(ids) == known.seen:
            return
        callbacks.say(f"{len(ids) - known.seen:,} tokens are read again")
        try:
            self._read_again(ids, boundaries, config, callbacks)
        except BaseException:
            self._restore(known, ids)
            raise
        self.turn, self._pending_ids, self.notes = None, [*end.pending_ids], end.notes
        self._capture(end, self.store, config)

    def _restore(self, known: Checkpoint, ids: Sequence[int]) -> bool:
        work = partial(restored, self.model, known, self.cache, self.store)
        if (before := self.oom_policy.run(work, {})) is None:
            return False
        self.cache, self.turn = before, None
        if known.store is None:
            self.store = None
        self.token_ids = [*ids[: known.seen]]
        self._pending_ids, self.notes = [*known.pending_ids], known.notes
        self.ahead = (0, 0.0)
        # A copy may be of another branch than the cache was on.
        self._forget(0 if known.alone else known.seen)
        return True

    def _read_again(
        self,
        ids: Sequence[int],
        boundaries: Sequence[int],
        config: EngineConfig,
        callbacks: Callbacks,
    ) -> None:
        for stop in (
            *(each for each in boundaries if len(self.token_ids) < each < len(ids)),
            len(ids),
        ):
            answer = stop == len(ids) and stop not in boundaries
            if answer and self.store is not None and self.store.begun:
                # The next turn reads it from here.
                empty = self.model.empty_cache().layers
                self.cache = KVCache(empty, len(ids), self.cache.reconstructed)
                self.token_ids = [*ids]
                continue
            new = [*ids[len(self.token_ids) : stop]]
            self.read(self.next_turn(new, config, answers=False), callbacks)
            self.turn, self._pending_ids = None, []

    def seek_answer(self, made: Checkpoint, turn: Turn, config: EngineConfig) -> bool:
        """Return the last turn to where it was before its answer; False if that is lost, or the
        new settings change more than sampling."""
        if not turn.may_answer_again(config):
            return False
        self._close()
        before: KVCache | None = None
        with suppress(OutOfMemory):
            work = partial(restored, self.model, made, self.cache, None)
            before = self.oom_policy.run(work, {})
        if before is None:
            return False
        if self.store is not None:
            self.store.forget_answer()
        self._forget(made.seen)
        self.cache.layers, self.cache.seen = before.layers, before.seen
        self.cache.states = before.states
        self.cache.writing = False
        del self.token_ids[made.seen :]
        turn.begin_again(config)
        return True

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of host memory that checkpoints take."""
        return bytes_of(self.checkpoints)

    def release(self, *unneeded: Checkpoint | None) -> None:
        """Free checkpoints."""
        for each in filter(None, unneeded):
            each.release_memory()
        self.checkpoints = [each for each in self.checkpoints if not each.lost]

    def _keep_within(self, config: EngineConfig) -> None:
        limit = config.checkpoint_bytes
        while self.checkpoint_bytes > limit:
            holding = next(each for each in self.checkpoints if bytes_of([each]))
            self.release(holding)

    def _forget(self, seen: int) -> None:
        later = (each for each in self.checkpoints if each.seen > seen and not each.alone)
        self.release(*later)

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()  # nobody listened to its end
        self._answer = None

    def _store_for(self, config: EngineConfig) -> HostKVStore | None:
        recall = config.settings.recall
        if recall == "off" or config.ignores_recall:
            return None
        require_in_sight(config.method, recall)
        if self.store is not None:
            self.store.bits = config.recall_bits
            return self.store
        if not can_recall(config.method):
            return None
        full = [self.cache.layers[index] for index in self.model.shape.full_layers]
        if any(
            layer.entries_mean < self.cache.seen or layer.computed or layer.shares_keys
            for layer in full
        ):
            return None  # some of it is gone
        return HostKVStore.empty(self.model.shape, self.model.dtype, config.recall_bits)


def _telling(weakly: WeakMethod[Callable[[str], None]]) -> Callable[[str], None]:
    # Weakly, as the turn that is told holds the OOM policy itself.
    def tell(said: str) -> None:
        if (note := weakly()) is not None:
            note(said)

    return tell
