"""One turn: read tokens, generate an answer, account for both."""

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from kvlite.cache import KVBits
from kvlite.cache.hidden_log import HiddenLog
from kvlite.config.settings import Settings
from kvlite.conversation.endings import FinishReason
from kvlite.conversation.figures import Account
from kvlite.conversation.metrics import Piece
from kvlite.conversation.reasoning import Reasoning, turn_grammar
from kvlite.conversation.run_stats import RunStats, wanted_bytes
from kvlite.conversation.turn_config import TurnConfig, notes
from kvlite.conversation.what_is_kept import TurnPlan, keep_what_fits
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.engine.compiled_rows import loops_for
from kvlite.engine.cuda_graph import GraphDecoder, graph_decoder
from kvlite.engine.detokenizer import AnswerText
from kvlite.engine.grammar import Grammar
from kvlite.engine.mtp import proposers
from kvlite.engine.oom_actions import cache_oom_actions
from kvlite.engine.passage_attention import watched
from kvlite.engine.prefill import CHUNK as USUAL
from kvlite.engine.prefill import prefill_in_slices
from kvlite.engine.prefill_oom import halved
from kvlite.engine.sampling import DRAWING, Sampler
from kvlite.engine.slices import Slices
from kvlite.engine.speculate import Speculation
from kvlite.engine.step import StepRows, step
from kvlite.errors import OutOfMemory, RecallError
from kvlite.memory.meter import PeakMeter, aside
from kvlite.memory.nvml import spill_note
from kvlite.memory.oom import CHUNK
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import LayerPolicy, layer_policies
from kvlite.methods.placement import ON_DEVICE
from kvlite.offload import HostKVStore, Recall, host_scoring_backend
from kvlite.ops.compile_ahead import begin_compiling
from kvlite.planner.cards import require_on_cards

if TYPE_CHECKING:
    from kvlite.conversation.context import Context

# With fewer multiplications, a turn takes less time than its plan.
PLANNED_FROM = 10**9


@dataclass(frozen=True)
class PromptState:
    """What a turn was before it was answered; `logits` are in host memory, `fallbacks` counts the
    steps that the OOM policy had taken."""

    logits: torch.Tensor
    policies: list[LayerPolicy]
    notes: tuple[str, ...]
    fallbacks: int


class Turn:
    """Reads into a cache and answers from it.

    Attributes:
        token_ids: all tokens in the cache; this turn's are appended as they enter it.
        pending_ids: a token that was generated and has not entered the cache.
        rows: of the decode step that memory ran out in, if it did.
        together: the most turns that took a decode step together, this one included.
        ahead: tokens that were read for it before, and in how many seconds.
        begun: how many of the tokens that were read last are of the answer, which goes on.
        failure: as of `GenerationMetrics`.
        everything: what it would keep if there is memory for it; `wanted` are the bytes of the
            device that this takes beside what there is.
    """

    def __init__(
        self,
        context: "Context",
        ids: list[int],
        config: EngineConfig,
        store: HostKVStore | None = None,
        *,
        answers: bool = True,
        plan: TurnPlan | None = None,
    ) -> None:
        """Check everything that can be checked before `ids` are read.

        Args:
            context: what was read before; not kept, so that it is freed at once when it goes.
            ids: at least one token.
            store: everything read so far, for recall; this turn's entries go there, too.
            answers: whether an answer will follow.
            plan: of a turn that reads as much, which is not planned again.

        Raises:
            ContextError: they do not fit the model's trained context.
            SettingError: the settings do not fit, or a token is not in the vocabulary.
        """
        started, settings, model = perf_counter(), config.settings, context.model
        self.model, self.cache, self.token_ids = model, context.cache, context.token_ids
        self.oom_policy, self.ids, self.config = context.oom_policy, ids, config
        if model.cards:
            require_on_cards(config)
        self.turn_config = TurnConfig.of(context, ids, config, answers=answers)
        self.answers, self.begun, self.watches = answers, 0, context.watches
        self.grammar = self._grammar([*self.token_ids, *ids])
        self.pending_ids: list[int] = []
        self.prompt: PromptState | None = None
        self.rows: StepRows | None = None
        self.together = 1
        self.ahead = (0, 0.0)
        self.failure = ""
        self.graphs: GraphDecoder | None = None
        self.speculation: Speculation | None = None
        self.say = NO_CALLBACKS.say
        self.notes: tuple[str, ...] = ()
        self._beside: tuple[str, ...] = ()
        self._fallbacks_before = len(self.oom_policy.taken)
        self._offered, self._told = store, {*context.told}
        self._decide(*self._placed())
        self.backend = host_scoring_backend(settings.scores, model.device)
        index, beside = ([], []) if store is None else (store.index_tensors, store.tensors)
        meter = PeakMeter(
            settings.measure,
            model.device,
            chain(model.tensors(), self.cache.tensors, index),
            beside,
            config.vram,
            model.cards,
        )
        if meter.capped is not None:
            self.oom_policy.free = meter.capped.free
        self.run_stats = RunStats(started, meter)
        work = (len(self.again) + len(ids)) * sum(model.shape.parameters.values())
        self.everything, self.wanted = self.turn_config, 0
        if plan is not None and not meter.of_tensors:
            self.keep(plan.budget, plan.bits)
            self.run_stats.planned_phases = {**plan.phases}
        elif meter.of_tensors or work >= PLANNED_FROM:
            keep_what_fits(self)
        self.wanted = self.wanted or wanted_bytes(self)

    @property
    def begins_to_drop(self) -> bool:
        """Whether it is the first one that drops something for lack of memory."""
        begins = self.store is not None and not self.store.begun and self.cache.seen > 0
        return begins and self.config.budget.auto and self.turn_config.drops

    @property
    def plan(self) -> TurnPlan:
        """What it keeps, and its planned peaks."""
        kept = self.turn_config
        return TurnPlan(kept.budget, kept.bits, self.run_stats.planned_phases)

    @property
    def settings(self) -> Settings:
        """As given."""
        return self.config.settings

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What was given up in this turn for lack of memory."""
        return tuple(dict.fromkeys(self.oom_policy.taken[self._fallbacks_before :]))

    @property
    def chunk(self) -> int:
        """Tokens that go through a layer together."""
        return halved(self.settings.chunk or USUAL, self.oom_policy.times(CHUNK))

    def _placed(self) -> tuple[HostKVStore | None, list[str]]:
        return self.turn_config.placed(self.config, self.model, self._offered, self._told)

    def keep(self, budget: int, bits: KVBits | None) -> None:
        """Keep so many entries, in so many bits."""
        self.turn_config = replace(self.everything, budget=budget, bits=bits)
        self._decide(*self._placed())

    def _decide(self, store: HostKVStore | None, said: list[str]) -> None:
        """Decide what is read, and by which policies; `said` are notes on recall."""
        model, cache, turn_config = self.model, self.cache, self.turn_config
        self.store = store
        self.recall = None if store is None else Recall(store, self.settings.recall_entries)
        # An answer came from what the cache held. Read again with everything, it is exact.
        self.again = self.token_ids[store.seen :] if store and store.begun else []
        # With a host store a layer has all it ever read to choose from, whatever it dropped.
        held, new = (None if store else cache.layers), len(self.again) + len(self.ids)
        self.policies = layer_policies(
            turn_config.method,
            model.shape,
            turn_config.budget,
            turn_config.seen,
            held,
            new,
            turn_config.bits,
        )
        self.notes = (*notes(model, self.policies, turn_config.seen), *said, *self._beside)

    def watch(self) -> None:
        """Log the queries that tell what an answer came from, if it has documents."""
        self.cache.queries = watched(self.model.shape) if self.watches else {}

    def note(self, said: tuple[str, ...]) -> None:
        """Add notes on what it will read."""
        self._beside = said
        self.notes = (*self.notes, *said)

    def read(self, callbacks: Callbacks) -> Slices[None]:
        """Read all tokens, or none. The notes are passed on first.

        Raises:
            Stopped: it was cancelled.
            OutOfMemory: nothing is left to give up.
        """
        self.say = callbacks.say
        for note in self.notes:
            self.say(note)
        loops = loops_for(self.policies, self.model.shape.kv_size, self.recall)
        begin_compiling(self.model.device, *loops)
        self.logits = yield from self.run_stats.in_slices(self.model, self._read(callbacks))
        for device in self.model.all_devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.run_stats.was_read()
        if said := spill_note(self.model.all_devices):
            self.note_fallback(said)
        self.token_ids += self.ids

    def _read(self, callbacks: Callbacks) -> Slices[torch.Tensor]:
        try:
            return (yield from self._prefilled(callbacks))
        except RecallError as error:  # the disk filled up in the meantime
            failed = str(error)
        if self.cache.seen and not self.cache.entries_mean:
            raise RecallError(failed)  # nothing but the host store has what was read
        self._decide(None, [failed])
        self.say(failed)
        return (yield from self._prefilled(callbacks))

    def _prefilled(self, callbacks: Callbacks) -> Slices[torch.Tensor]:
        if self.model.mtp is None or self.settings.speculate == "off":
            self.cache.hidden = None
        elif self.cache.hidden is None:
            self.cache.hidden = HiddenLog(self.model.device)
        known = len(self.token_ids) - len(self.again)
        return prefill_in_slices(
            self.model,
            self.cache,
            torch.tensor([self.again + self.ids]),
            self.policies,
            context=torch.tensor([self.token_ids[:known]], dtype=torch.int64),
            store=self.store,
            backend=self.backend or ON_DEVICE,
            oom_policy=self.oom_policy,
            reserve=self.turn_config.planned,
            chunk=self.chunk,
            callbacks=callbacks,
        )

    def answer(
        self, cancel: Event | None, *, in_words: bool, ignore_eos: bool = False
    ) -> Generator[Piece]:
        """Generate until the model ends, a stop string, the length limit, or `cancel`. If memory
        runs out and nothing is left to give up, the last piece has no token. In words, reasoning is
        told apart."""
        with aside():
            logits = self.logits.to("cpu", copy=True)
        self.prompt = PromptState(logits, [*self.policies], self.notes, len(self.oom_policy.taken))
        sampler = Sampler(self.config, self.model.device, self.grammar)
        self.graphs = graph_decoder(self.model, sampler)
        text = AnswerText(self.model.tokenizer, self.settings.stop, self.model.spelled)
        ends = frozenset() if ignore_eos else self.model.stop_ids
        self.speculation = speculation = self._speculation(ends)
        account, reasoning = Account(self), None
        if in_words and self.model.answer_form.reasoning is not None:
            reasoning = Reasoning(self.model, self.token_ids, self.begun)

        def piece(token: int | None, shown: str, raw: str, why: FinishReason | None) -> Piece:
            made = Piece(token, shown, account.figures(self, why), why, raw=raw)
            return made if reasoning is None else reasoning.told(made)

        try:
            while True:
                token = None if self.graphs is None else self.graphs.drawn()
                if token is None:
                    gives_up = cache_oom_actions(self.model, self.cache, self.policies)
                    draw = partial(sampler, self.logits, self.token_ids)
                    token = self.oom_policy.run(draw, gives_up)
                self.pending_ids = [token]
                self.run_stats.was_drawn()
                speculation.drawn()
                shown, raw = ("", "") if token in ends else text.push(token)
                ended = sampler.take(token) or token in ends or text.stopped
                reason = self._reason(ended, cancel)
                if reason == "length" and self.grammar is not None and not self.grammar.may_end:
                    self._fail(self.turn_config.unfinished)
                if reason is not None:
                    rest, rest_raw = text.flush()
                    yield piece(token, shown + rest, raw + rest_raw, reason)
                    return
                yield piece(token, shown, raw, None)
                if self.rows is not None:
                    self.finish_step()  # memory ran out in a step with other turns
                elif self.pending_ids:
                    self._enter(token, speculation)
        except OutOfMemory as error:
            self._fail(str(error))
            shown, raw = text.flush()
            yield piece(None, shown, raw, "memory")
        finally:
            account.end()
            speculation.release()
            if self.graphs is not None:
                self.graphs.release()

    def may_answer_again(self, config: EngineConfig) -> bool:
        """Whether another answer only needs sampling: nothing was given up since the prompt was
        read, and no other settings changed."""
        drawn = {name: getattr(config.settings, name) for name in DRAWING}
        whole = self.prompt is not None and len(self.oom_policy.taken) == self.prompt.fallbacks
        return whole and self.settings.replace(drawn) == config.settings

    def begin_again(self, config: EngineConfig) -> None:
        """Forget the answer, once cache and context are as before it."""
        assert self.prompt is not None
        self.logits = self.prompt.logits.to(self.model.device, copy=True)
        self.policies = [*self.prompt.policies]
        self.notes, self.config = self.prompt.notes, config
        self.grammar = self._grammar(self.token_ids)
        if self.store is not None:
            self.recall = Recall(self.store, config.settings.recall_entries)
        self.pending_ids, self.rows, self.failure = [], None, ""
        self.run_stats.begin_again()

    def go_on(self, begun: int) -> None:
        """Go on with an answer, of which it reads the last of so many tokens."""
        self.begun = begun
        self.grammar = self._grammar([*self.token_ids, *self.ids])

    def _grammar(self, ids: list[int]) -> Grammar | None:
        return turn_grammar(self.model, self.settings, ids, self.begun) if self.answers else None

    def _speculation(self, ends: Collection[int]) -> Speculation:
        off = "--speculate off" if self.settings.speculate == "off" else ""
        made = [] if off else proposers(self.model, self.cache, self.token_ids)
        given = self.model, self.cache, self.policies, self.recall
        return Speculation(*given, made, ends, off)

    def _enter(self, token: int, speculation: Speculation) -> None:
        most = self.turn_config.limit - self.run_stats.generated
        with self.stepping():
            logits = speculation.enter(token, most)
            if logits is None and self.graphs is not None:
                ahead = speculation.resting and most > 1
                logits = self.graphs.step([self.next_rows()], self.token_ids, ahead=ahead)
            if logits is not None:
                self.entered(logits)
                return
        self.rows = self.next_rows()
        self.finish_step()

    def next_rows(self) -> StepRows:
        """The pending token as the row of a decode step."""
        ids = torch.tensor([self.pending_ids])
        given = self.policies, self.recall, self.oom_policy
        return StepRows(self.model, self.cache, ids, *given)

    def finish_step(self) -> None:
        """Take the decode step of the last token, if it did not end.

        Raises:
            OutOfMemory: there is still not enough.
        """
        if self.rows is None:
            return
        with self.stepping():
            (made,) = step(self.model, [self.rows])
            if not isinstance(made, OutOfMemory):
                self.entered(made)
                return
        raise made

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count what a step takes; an interrupt may come once its token is in the cache."""
        seen, known, pending = self.cache.seen, len(self.token_ids), self.pending_ids
        try:
            with self.run_stats.work(self.model):
                yield
        except BaseException:
            self.rows = None
            if self.cache.seen > seen:
                self.token_ids[known:], self.pending_ids = pending, []
            raise

    def entered(self, logits: torch.Tensor) -> None:
        """Go on from `logits` of the next token: the pending one is in the cache."""
        self.logits = logits
        self.token_ids += self.pending_ids
        self.pending_ids, self.rows = [], None

    def note_fallback(self, said: str) -> None:
        """Note what was given up for lack of memory, and say so."""
        self.notes = (*self.notes, said)
        self.say(said)

    def _fail(self, said: str) -> None:
        """Note why the answer cannot be used, and say so."""
        self.failure = said
        self.note_fallback(said)

    def _reason(self, ended: bool, cancel: Event | None) -> FinishReason | None:
        if ended:
            return "stop"
        if cancel is not None and cancel.is_set():
            return "interrupted"
        return "length" if self.run_stats.generated >= self.turn_config.limit else None
