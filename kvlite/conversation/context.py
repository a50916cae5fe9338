"""What a conversation has read, as tokens: its cache, the tier beside it, and the way back."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from threading import Event
from weakref import ref

from kvlite.cache import KVCache, parse_kv_bits
from kvlite.config.settings import Settings
from kvlite.conversation.checkpoint import (
    Checkpoint,
    bytes_of,
    checkpoint,
    copy_out,
    everything,
    restored,
)
from kvlite.conversation.metrics import Piece
from kvlite.conversation.session_state import Held
from kvlite.conversation.turn import Turn
from kvlite.conversation.turn_config import can_compact
from kvlite.engine.callbacks import Audience
from kvlite.engine.prefill import empty_cache
from kvlite.engine.shift import compacted
from kvlite.errors import OutOfMemory
from kvlite.memory.device_budget import checkpoint_limit, ram_limit
from kvlite.memory.oom import Ladder
from kvlite.methods.budget import method_and_amount
from kvlite.methods.layer_policy import can_recall, require_in_sight
from kvlite.model.load import LoadedModel
from kvlite.offload import Tier


class Context:
    """Everything read and answered so far.

    Attributes:
        cache: keys and values held.
        tier: everything that was read, if turns recall.
        token_ids: every token in the cache, in order.
        turn: the last one.
        ladder: what was given up when memory ran out.
        checkpoints: those that hold anything, the oldest first.
        noted: what the next answer is to note of what was read before.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.cache = empty_cache(model)
        self.tier: Tier | None = None
        self.token_ids: list[int] = []
        self.turn: Turn | None = None
        self.ladder = Ladder(model.device)
        self.checkpoints: list[Checkpoint] = []
        self._left: list[int] = []
        self.noted: tuple[str, ...] = ()
        self._told: set[str] = set()
        self._answer: Generator[Piece] | None = None

    @property
    def pending(self) -> list[int]:
        """What was answered last and has not been read."""
        return self._left if self.turn is None else self.turn.pending

    def resume(self, held: Held) -> None:
        """Go on from what another held."""
        self.cache, self.tier, self.token_ids = held.cache, held.tier, held.token_ids
        self._left, self.noted = held.pending, held.noted
        self.ladder.taken = held.given_up

    def end_step(self, settings: Settings) -> None:
        """Go on with a token for which there was no memory in the middle of an answer, unless the
        next turn reads it from the tier anyway.

        Raises:
            OutOfMemory: there is still not enough.
        """
        turn = self.turn
        if turn is not None and (turn.tier is None or self._tier_for(settings) is None):
            turn.finish_step()

    def next_turn(self, ids: list[int], settings: Settings, *, answers: bool = True) -> Turn:
        """A turn that reads tokens, checked and not begun.

        Raises:
            ContextError, SettingError: as `Turn`.
        """
        turn = self._turn(ids, settings, self._tier_for(settings), answers)
        if turn.tier is None and self.emptied:
            notes = turn.notes
            turn = self._turn([*self._fill(), *ids], settings, None, answers)
            turn.notes = tuple(dict.fromkeys([*notes, *turn.notes]))
        return turn

    def _turn(self, ids: list[int], settings: Settings, tier: Tier | None, answers: bool) -> Turn:
        return Turn(
            self.model,
            self.cache,
            self.token_ids,
            ids,
            settings,
            ladder=self.ladder,
            tier=tier,
            answers=answers,
            told=self._told,
        )

    @property
    def emptied(self) -> bool:
        """Whether the cache holds nothing, since the tier has all that was read."""
        return self.tier is not None and self.tier.begun and not self.cache.entries_mean

    def _fill(self) -> list[int]:
        """Let an emptied cache hold all that the tier has; what of the last answer that has not, to
        be read before anything else."""
        tier = self.tier
        assert tier is not None
        work = partial(everything, self.model, self.cache, tier)
        self.cache = self.ladder.run(work, {})
        again = self.token_ids[tier.seen :]
        self.token_ids = self.token_ids[: tier.seen]
        self.tier, self._left = None, [*again, *self._left]
        self._forget(0)
        return again

    def require_readable(self, ids: list[int], settings: Settings, *, answers: bool) -> None:
        """Raises what `next_turn` would if nothing else had been read."""
        cache, ladder = empty_cache(self.model), Ladder(self.model.device)
        Turn(self.model, cache, [], ids, settings, ladder=ladder, answers=answers)

    def outgrows(self, count: int, settings: Settings, *, answers: bool) -> bool:
        """Whether `count` tokens and an answer would not fit the model's trained context any more,
        but might if there were nothing else."""
        limit = self.model.shape.max_context
        longest = settings.max_new_tokens if answers else 0
        grown = self.cache.seen + count + min(longest, limit // 4) > limit
        return grown and can_compact(count, longest, limit)

    def compact(self) -> list[int]:
        """Move what the cache holds together, at most half of the model's trained context. Nothing
        can be recalled of what it does not hold, nor gone back to.

        Returns:
            What of the last answer has to be read before anything else.

        Raises:
            SettingError: the model's rotations do not allow it.
            OutOfMemory: there is not enough memory for it.
        """
        self._close()
        again = self._fill() if self.emptied else []
        half = self.model.shape.max_context // 2
        self.cache = self.ladder.run(partial(compacted, self.model, self.cache, half), {})
        self.noted = (
            *self.noted,
            f"the conversation outgrew the {self.model.shape.max_context:,} tokens that this model "
            f"was trained for: it goes on with the {self.cache.seen:,} that the cache held, the "
            "rest is forgotten",
        )
        self._left, self.tier, self.turn = self.pending, None, None
        self.token_ids = self.token_ids[-self.cache.seen :]
        self._forget(0)
        return again

    def read(self, turn: Turn, audience: Audience) -> None:
        """Read a turn; what it noted is noted with the next answer too, if it has none itself."""
        self._close()
        gives_back = turn.tier is not None and turn.tier.bits is None
        if turn.terms.loses and not gives_back:
            self._copy_out(turn.settings)
        self.ladder.never_lossy, self.ladder.tell = turn.settings.never_lossy, _telling(turn)
        turn.read(audience)
        self.turn = turn
        turn.notes = tuple(dict.fromkeys([*self.noted, *turn.notes]))
        self.noted = () if turn.answers else turn.notes
        self._told.update(turn.notes)
        if turn.tier is not None or not _set_aside(turn.settings):
            self.tier = turn.tier

    def answer(self, turn: Turn, *, ignore_eos: bool, cancel: Event | None) -> Iterator[Piece]:
        """Answer a turn that was read. A new turn ends it."""
        self._answer = turn.answer(ignore_eos=ignore_eos, cancel=cancel)
        yield from self._answer

    def hold(self, settings: Settings) -> Checkpoint:
        """A checkpoint of how things stand, before anything else is read."""
        self._close()
        return self._held(self._standing(self.tier, settings), settings)

    def hold_answering(self, settings: Settings) -> Checkpoint:
        """A checkpoint of what was read, before it is answered."""
        return self._held(self._standing(None, settings), settings)

    def _standing(self, tier: Tier | None, settings: Settings) -> Checkpoint:
        """How things stand; lost from the beginning where there is no memory to keep it, or it
        would be let go of at once."""
        pending, noted = [*self.pending], self.noted
        most = checkpoint_limit(settings.checkpoint_limit)
        work = partial(checkpoint, self.model, self.cache, tier, most, pending, noted)
        try:
            return self.ladder.run(work, {})
        except OutOfMemory:
            return Checkpoint(self.cache.seen, pending, noted, self.cache.rehearsed, lost=True)

    def _copy_out(self, settings: Settings) -> None:
        """Copy what checkpoints need, as far as there is memory for that, and it may be taken."""
        most = checkpoint_limit(settings.checkpoint_limit)
        try:
            self.ladder.run(partial(copy_out, self.checkpoints, self.cache, most), {})
        except OutOfMemory:
            self._forget(0)
        self._drop_lost()
        self._keep_within(settings)

    def go_to(
        self,
        ids: Sequence[int],
        end: Checkpoint,
        ways: Sequence[Checkpoint],
        stops: Sequence[int],
        settings: Settings,
        audience: Audience,
    ) -> None:
        """Let things stand as when just `ids` had been read. What no checkpoint gives back is read
        again.

        Args:
            end: what was pending then, and noted; if it holds anything, that is tried first.
            ways: checkpoints of the way there, the last first.
            stops: how much of `ids` had been read whenever reading ended: what is read again is
                read in the same parts.
            audience: told if something has to be read again.

        Raises:
            as `Turn`, if something has to be: then things stand as at the last checkpoint that held
            something.
        """
        self._close()
        beginning = Checkpoint(0, [], (), 0)
        known = next(way for way in (end, *ways, beginning) if self._stand(way, ids))
        if len(ids) == known.seen:
            return
        if audience.notify is not None:
            audience.notify(f"{len(ids) - known.seen:,} tokens are read again")
        try:
            self._read_again(ids, stops, settings, audience)
        except BaseException:
            self._stand(known, ids)
            raise
        self.turn, self._left, self.noted = None, [*end.pending], end.noted
        end.take_over(self._standing(self.tier, settings))
        self._held(end, settings)

    def _stand(self, known: Checkpoint, ids: Sequence[int]) -> bool:
        """Let things stand as at a checkpoint, if anything has what it takes."""
        before = self._restored(known, self.tier)
        if before is None:
            return False
        self.cache, self.turn = before, None
        if known.tier is None:
            self.tier = None
        self.token_ids = [*ids[: known.seen]]
        self._left, self.noted = [*known.pending], known.noted
        # A copy may be of another way than the cache was on.
        self._forget(0 if known.alone else known.seen)
        return True

    def _restored(self, known: Checkpoint, tier: Tier | None) -> KVCache | None:
        work = partial(restored, self.model, known, self.cache, tier)
        return self.ladder.run(work, {})

    def _read_again(
        self, ids: Sequence[int], stops: Sequence[int], settings: Settings, audience: Audience
    ) -> None:
        """Read on to the end of `ids`, in parts."""
        for stop in (*(each for each in stops if len(self.token_ids) < each < len(ids)), len(ids)):
            answer = stop == len(ids) and stop not in stops
            if answer and self.tier is not None and self.tier.begun:
                # The next turn reads it from here.
                empty = empty_cache(self.model).layers
                self.cache = KVCache(empty, len(ids), self.cache.rehearsed)
                self.token_ids = [*ids]
                continue
            new = [*ids[len(self.token_ids) : stop]]
            self.read(self.next_turn(new, settings, answers=False), audience)
            self.turn, self._left = None, []

    def return_to_answering(self, made: Checkpoint) -> bool:
        """Let the last turn stand as it did before it was answered; False if that is lost."""
        self._close()
        try:
            before = self._restored(made, None)
        except OutOfMemory:
            before = None
        if before is None:
            return False
        if self.tier is not None:
            self.tier.forget_answer()
        self._forget(made.seen)
        self.cache.layers, self.cache.seen = before.layers, before.seen
        self.cache.writing = False
        del self.token_ids[made.seen :]
        return True

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of host memory that checkpoints take."""
        return bytes_of(self.checkpoints)

    def leave(self, made: Checkpoint) -> None:
        """Let go of a checkpoint."""
        made.let_go()
        self._drop_lost()

    def _held(self, made: Checkpoint, settings: Settings) -> Checkpoint:
        if not made.lost:
            self.checkpoints.append(made)
            self._keep_within(settings)
        return made

    def _keep_within(self, settings: Settings) -> None:
        """Let go of the oldest checkpoints that hold anything, while all take too much."""
        limit = checkpoint_limit(settings.checkpoint_limit)
        while self.checkpoint_bytes > limit:
            holding = next(each for each in self.checkpoints if bytes_of([each]))
            self.leave(holding)

    def _forget(self, seen: int) -> None:
        """Let go of checkpoints of what came later, unless they have it all themselves."""
        for each in self.checkpoints:
            if each.seen > seen and not each.alone:
                each.let_go()
        self._drop_lost()

    def _drop_lost(self) -> None:
        self.checkpoints = [each for each in self.checkpoints if not each.lost]

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()  # nobody listened to its end
        self._answer = None

    def _tier_for(self, settings: Settings) -> Tier | None:
        """What a turn recalls from, if its settings ask for that."""
        method, _ = method_and_amount(settings.method, settings.budget)
        ram_limit(settings.recall_limit, 0)
        if settings.recall == "off" or _set_aside(settings):
            return None
        require_in_sight(method, settings.recall)
        bits = parse_kv_bits(settings.recall_bits)
        if self.tier is not None:
            self.tier.bits = bits
            return self.tier
        if not can_recall(method):
            return None
        full = [self.cache.layers[index] for index in self.model.shape.full_layers]
        if any(
            layer.entries_mean < self.cache.seen or layer.computed or layer.packed for layer in full
        ):
            return None  # some of it is gone
        return Tier.empty(self.model.shape, self.model.dtype, bits)


def _set_aside(settings: Settings) -> bool:
    """Whether a turn does not look at the tier, which later ones may: they read again what they
    missed."""
    method, _ = method_and_amount(settings.method, settings.budget)
    return method.mask(1) is not None and settings.recall == "auto"


def _telling(turn: Turn) -> Callable[[str], None]:
    """Tells a turn what is given up, without keeping it: it holds the ladder that does."""
    held = ref(turn)

    def tell(said: str) -> None:
        current = held()
        if current is not None:
            current.gave_up(said)

    return tell
