"""One turn: tokens read, an answer drawn, and its ledger."""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from threading import Event
from time import perf_counter

import torch

from kvlite.cache import KVCache
from kvlite.cache.bits import written
from kvlite.cache.front import bytes_held
from kvlite.config.settings import Settings
from kvlite.conversation.metrics import FinishReason, Ledger, Piece
from kvlite.conversation.run_stats import Account, recalled
from kvlite.conversation.turn_config import Terms, tier_in_effect
from kvlite.conversation.warnings import notes
from kvlite.engine.callbacks import Audience, Notify
from kvlite.engine.decode import Step
from kvlite.engine.detokenizer import TextStream
from kvlite.engine.oom_actions import cache_offers
from kvlite.engine.prefill import prefill
from kvlite.engine.prefill_oom import halved
from kvlite.engine.reading import CHUNK as USUAL
from kvlite.engine.sampling import Sampler
from kvlite.errors import ForecastError, OutOfMemory, RecallError
from kvlite.memory.device_budget import capped_bytes
from kvlite.memory.meter import PeakMeter, aside
from kvlite.memory.nvml import card_use, spill_note, spills
from kvlite.memory.oom import CHUNK, Ladder, T
from kvlite.methods.layer_policy import Rule, layer_rules
from kvlite.methods.placement import ON_DEVICE
from kvlite.model.load import LoadedModel
from kvlite.offload import Recall, Tier, host_desk
from kvlite.offload.kv.compile_ahead import begin_compiling
from kvlite.planner.forecast import Task, forecast
from kvlite.planner.meta import hollow
from kvlite.planner.meta_model import meta_model_of

# How tokens are drawn from logits, and when that ends.
DRAWING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
)

# Multiplications, below which a turn takes less time than its plan.
PLANNED_FROM = 10**9


@dataclass(frozen=True)
class AsRead:
    """A turn before it was answered.

    Attributes:
        logits: in host memory.
        rules, notes: as of `Turn`.
        rungs: of the ladder that were taken.
    """

    logits: torch.Tensor
    rules: list[Rule]
    notes: tuple[str, ...]
    rungs: int


class Turn:
    """Reads into a cache and answers from it.

    Attributes:
        context: the conversation's tokens in the cache; what enters it is appended.
        pending: a token that was drawn and has not entered the cache.
        terms: what its settings come to.
        account: of what the turn takes.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        context: list[int],
        ids: list[int],
        settings: Settings,
        *,
        ladder: Ladder,
        tier: Tier | None = None,
        answers: bool = True,
        told: Collection[str] = (),
    ) -> None:
        """Check everything that can be checked before `ids` are read.

        Args:
            ids: what to read, at least one token.
            ladder: what the conversation has given up so far; takes what this turn gives up.
            tier: everything read so far; takes what is read and answered now.
            answers: whether an answer will follow.
            told: sentences that need not be said again.

        Raises:
            ContextError: they do not fit the model's trained context.
            SettingError: the settings do not fit, or a token is not in the vocabulary.
        """
        started = perf_counter()
        self.model = model
        self.cache = cache
        self.context = context
        self.ids = ids
        self.settings = settings
        self.answers = answers
        self.pending: list[int] = []
        self.as_read: AsRead | None = None
        self.step: Step | None = None
        self.ladder = ladder
        self.say: Notify = _nothing
        self._beside: tuple[str, ...] = ()
        self.given_up = len(ladder.taken)
        self.terms = Terms.of(model, cache.seen, ids, settings, ladder, answers=answers)
        self._decide(*tier_in_effect(tier, model, settings, self.terms, told))
        self.desk = host_desk(settings.scores, model.device)
        beside = [] if tier is None else tier.tensors
        meter = PeakMeter(
            settings.measure,
            model.device,
            [*model.tensors(), *cache.tensors, *(() if tier is None else tier.index_tensors)],
            beside,
            capped_bytes(settings.vram),
        )
        if meter.capped is not None:
            ladder.free = meter.capped.free
        self.account = Account(started, meter)
        work = (len(self.again) + len(ids)) * sum(model.shape.parameters.values())
        if meter.of_tensors or work >= PLANNED_FROM:
            self.account.planned_phases = self._planned()

    @property
    def forgets(self) -> bool:
        """Whether something of it will be out of reach of any later turn."""
        return self.terms.loses and (self.tier is None or not self.terms.method.exact)

    @property
    def chunk(self) -> int:
        """Tokens that go through a layer together."""
        return halved(self.settings.chunk or USUAL, self.ladder.times(CHUNK))

    def _planned(self) -> dict[str, int]:
        """The peak that each phase is expected to have, in bytes of live tensors; none where that
        cannot be told."""
        model = self.model
        task = Task(
            new=len(self.again) + len(self.ids),
            longest=self.terms.longest,
            known=len(self.context) - len(self.again),
            chunk=self.chunk,
            recalled=self.settings.recall_entries,
        )
        tier = None if self.tier is None else hollow(replace(self.tier, ferry=None, disk=None))
        try:
            made = forecast(meta_model_of(model), hollow(self.cache), self.rules, task, tier)
        except ForecastError:
            return {}
        weights, reading = bytes_held(model.tensors()), max(made.reading.total, made.choosing.total)
        return {"read": weights + reading, "answer": weights + made.answering.total}

    def _decide(self, tier: Tier | None, said: list[str]) -> None:
        """Decide what is read, and by which rules.

        Args:
            said: what the user is told of recall.
        """
        model, cache, terms = self.model, self.cache, self.terms
        self.tier = tier
        self.recall = None if tier is None else Recall(tier, self.settings.recall_entries)
        # An answer was drawn from what the cache held; read with all there is, it is exact.
        self.again = self.context[tier.seen :] if tier and tier.begun else []
        # With a tier a layer has all it ever read to choose from, whatever it dropped.
        held, new = (None if tier else cache.layers), len(self.again) + len(self.ids)
        self.rules = layer_rules(
            terms.method, model.shape, terms.budget, terms.seen, held, new, terms.bits
        )
        self.notes = (*notes(model, self.rules, terms.seen), *said, *self._beside)

    def note(self, said: tuple[str, ...]) -> None:
        """Note what is known of what it reads, before it is read."""
        self._beside = said
        self.notes = (*self.notes, *said)

    def read(self, audience: Audience) -> None:
        """Read all tokens, or none.

        Args:
            audience: told the notes, before anything is read.

        Raises:
            Stopped: it was cancelled.
            OutOfMemory: nothing is left to give up.
        """
        self.say = say = audience.notify or _nothing
        for note in self.notes:
            say(note)
        if self.tier is not None and self.settings.recall_entries:
            begin_compiling(self.model.device)
        with self.account.work(self.model):
            failed = ""
            try:
                self.logits = self._safely(lambda: self._prefilled(audience))
            except RecallError as error:  # the disk filled up in the meantime
                failed = str(error)
            if failed and self.cache.seen and not self.cache.entries_mean:
                raise RecallError(failed)  # nothing but the tier has what was read
            if failed:
                self._decide(None, [failed])
                say(failed)
                self.logits = self._safely(lambda: self._prefilled(audience))
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.account.was_read()
        if spills() and (said := spill_note(card_use(self.model.device))):
            self.gave_up(said)
        self.context += self.ids

    def _prefilled(self, audience: Audience) -> torch.Tensor:
        device, known = self.model.device, len(self.context) - len(self.again)
        return prefill(
            self.model,
            self.cache,
            torch.tensor([self.again + self.ids], device=device),
            self.rules,
            context=torch.tensor([self.context[:known]], dtype=torch.int64, device=device),
            tier=self.tier,
            desk=self.desk or ON_DEVICE,
            ladder=self.ladder,
            reserve=self.terms.longest,
            chunk=self.chunk,
            progress=audience.progress,
            cancel=audience.cancel,
        )

    def answer(self, *, ignore_eos: bool, cancel: Event | None) -> Generator[Piece]:
        """Draw tokens until the model ends, a stop string, the length limit, or `cancel`; or memory
        runs out, and nothing is left to give up: then the last piece has no token."""
        rungs = len(self.ladder.taken)
        with aside():
            logits = self.logits.to("cpu", copy=True)
        self.as_read = AsRead(logits, [*self.rules], self.notes, rungs)
        sampler = Sampler(self.settings, self.model.device)
        text = TextStream(self.model.tokenizer, self.settings.stop)
        ends = frozenset() if ignore_eos else self.model.stop_ids
        while True:
            try:
                token = self._safely(lambda: sampler(self.logits, self.context))
            except OutOfMemory as error:
                yield self._broken_off(text, error)
                return
            self.pending = [token]
            self.account.was_drawn()
            shown = "" if token in ends else text.push(token)
            reason = self._reason(token in ends or text.stopped, cancel)
            if reason is not None:
                yield Piece(token, shown + text.flush(), self.ledger(reason))
                return
            yield Piece(token, shown, self.ledger(None))
            try:
                self._enter(token)
            except OutOfMemory as error:
                yield self._broken_off(text, error)
                return

    def may_answer_again(self, settings: Settings) -> bool:
        """Whether another answer can be drawn from what was read: nothing was given up since, and
        settings differ from this turn's in how tokens are drawn at most."""
        drawn = {name: getattr(settings, name) for name in DRAWING}
        whole = self.as_read is not None and len(self.ladder.taken) == self.as_read.rungs
        return whole and self.settings.replace(drawn) == settings

    def begin_again(self, settings: Settings) -> None:
        """Forget an answer, once cache and context stand as before it."""
        assert self.as_read is not None
        self.logits = self.as_read.logits.to(self.model.device, copy=True)
        self.rules = [*self.as_read.rules]
        self.notes, self.settings = self.as_read.notes, settings
        if self.tier is not None:
            self.recall = Recall(self.tier, settings.recall_entries)
        self.pending, self.step = [], None
        self.account.begin_again()

    def _enter(self, token: int) -> None:
        """Put a token that was drawn into the cache."""
        with self.account.work(self.model):
            self.step = self._safely(lambda: self._step(token))
        self.finish_step()

    def _step(self, token: int) -> Step:
        step = torch.tensor([token], device=self.model.device)
        return Step(self.model, self.cache, step, self.rules, self.recall, self.ladder)

    def finish_step(self) -> None:
        """Go on with a token on its way into the cache, if there is one, which may have been broken
        off when memory ran out.

        Raises:
            OutOfMemory: there is still not enough.
        """
        if self.step is None:
            return
        try:
            with self.account.work(self.model):
                self.logits = self.step.run()
        except OutOfMemory:
            raise
        except BaseException:
            self.step = None  # nobody knows where it was interrupted
            raise
        self.context += self.pending
        self.pending, self.step = [], None

    def _broken_off(self, text: TextStream, error: OutOfMemory) -> Piece:
        """The end of an answer for which there is no memory."""
        self.notes = (*self.notes, str(error))
        self.say(str(error))
        return Piece(None, text.flush(), self.ledger("memory"))

    def _safely(self, work: Callable[[], T]) -> T:
        """Do a part of the turn that can be done again."""
        return self.ladder.run(work, cache_offers(self.model, self.cache, self.rules))

    def gave_up(self, said: str) -> None:
        """Note what happened to memory, when it does."""
        self.notes = (*self.notes, said)
        self.say(said)

    def _reason(self, ended: bool, cancel: Event | None) -> FinishReason | None:
        if ended:
            return "stop"
        if cancel is not None and cancel.is_set():
            return "interrupted"
        return "length" if self.account.generated >= self.terms.longest else None

    def ledger(self, reason: FinishReason | None) -> Ledger:
        """The account as it stands."""
        model, cache, desk = self.model, self.cache, self.desk
        itemsize, read = model.dtype.itemsize, len(self.again) + len(self.ids)
        return Ledger(
            finish_reason=reason,
            notes=self.notes,
            rungs=tuple(dict.fromkeys(self.ladder.taken[self.given_up :])),
            model=self.settings.model,
            device=str(model.device),
            weights=model.weights.name,
            dtype=str(model.dtype).removeprefix("torch."),
            method=self.terms.method.spec,
            kv_bits=written(self.rules[0].bits),
            budget=self.terms.budget,
            prompt_tokens=len(self.ids),
            again_tokens=len(self.again),
            seen_tokens=cache.seen,
            kept_entries_mean=cache.entries_mean,
            kv_bytes=cache.nbytes,
            full_kv_bytes=model.shape.full_kv_bytes(cache.seen, itemsize),
            score_bytes_to_host=None if desk is None else desk.wire.to_host,
            score_bytes_back=None if desk is None else desk.wire.back,
            score_s=None if desk is None else desk.seconds,
            **recalled(self.tier, self.recall, model.shape.entry_bytes(itemsize)),
            **self.account.figures(read, ended=reason is not None),
        )


def _nothing(note: str) -> None:
    """Said to nobody."""
