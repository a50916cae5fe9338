"""One turn: tokens read, an answer drawn, and the account of both."""

from collections.abc import Generator
from threading import Event
from time import perf_counter

import torch

from kvlite.cache import KVCache, parse_kv_bits
from kvlite.cache.bits import written
from kvlite.engine.decode import decode_step
from kvlite.engine.prefill import Progress, prefill
from kvlite.engine.sampling import Sampler
from kvlite.engine.text import TextStream
from kvlite.errors import ContextError, SettingError
from kvlite.ledger import FinishReason, Ledger, Piece
from kvlite.memory.meter import PeakMeter
from kvlite.methods.amount import method_and_amount
from kvlite.methods.rules import layer_rules
from kvlite.model.load import LoadedModel
from kvlite.model.weights import held_tensors
from kvlite.notes import notes
from kvlite.offload import Recall, Tier
from kvlite.offload.room import ram_limit, tier_bytes
from kvlite.settings import Settings
from kvlite.sizes import readable


class Turn:
    """Reads into a cache and answers from it.

    Attributes:
        context: the conversation's tokens in the cache; what enters it is appended.
        pending: a token that was drawn and has not entered the cache.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        context: list[int],
        ids: list[int],
        settings: Settings,
        *,
        tier: Tier | None = None,
        answers: bool = True,
    ) -> None:
        """Check everything that can be checked before `ids` are read.

        Args:
            ids: what to read, at least one token.
            tier: everything read so far; takes what is read and answered now.
            answers: whether an answer will follow.

        Raises:
            ContextError: they do not fit the model's trained context.
            SettingError: the settings do not fit, or a token is not in the vocabulary.
        """
        self.model = model
        self.cache = cache
        self.context = context
        self.ids = ids
        self.settings = settings
        self.pending: list[int] = []
        self._require_known(ids)
        self.longest = self._within_context(settings.max_new_tokens if answers else 0)
        seen = cache.seen + len(ids)
        method, amount = method_and_amount(settings.method, settings.budget)
        self.method = method.fitted(model.shape, model.calibration)
        bits = parse_kv_bits(settings.kv_bits)
        self.budget = amount.resolve(
            model.shape, self.method, seen, self.longest, model.dtype.itemsize, bits
        )
        if self.budget < seen:
            self.method.check(self.budget)
        self.tier, said = self._recalled_from(tier, seen, exact=bits is None)
        # An answer was drawn from what the cache held; read with all there is, it is exact.
        self.again = context[self.tier.seen :] if self.tier and self.tier.begun else []
        # With a tier a layer has all it ever read to choose from, whatever it dropped.
        held, new = (None if self.tier else cache.layers), len(self.again) + len(ids)
        self.rules = layer_rules(self.method, model.shape, self.budget, seen, held, new, bits)
        self.notes = (*notes(model, self.rules, seen), *said)
        self.meter = PeakMeter(settings.measure, model.device, held_tensors(model.module))
        self.generated = 0
        self.started = perf_counter()
        self.read_s = 0.0
        self.first_s = 0.0
        self.last_s = 0.0

    def _recalled_from(
        self, tier: Tier | None, seen: int, *, exact: bool
    ) -> tuple[Tier | None, list[str]]:
        """The tier, unless this turn loses nothing, or it cannot be; then what the user is told.

        Args:
            exact: whether the cache is not quantized.
        """
        settings, wanted = self.settings, self.settings.recall != "off"
        grows = self.method.only_grows and self.method.settles is None
        most = seen if grows else seen + self.longest
        if exact and self.budget >= most and not (tier and tier.begun):
            return None, []
        if tier is None:
            if not wanted or not self.method.frees_memory:
                return None, []
            return None, [
                f"--recall {settings.recall} cannot begin now, since some of what was read before "
                "is gone: only a new conversation can recall"
            ]
        tokens, limit = seen + self.longest, ram_limit(settings.recall_limit, tier.nbytes)
        needed = tier_bytes(self.model.shape, tokens, self.model.dtype.itemsize, tier.bits)
        if needed <= limit:
            return tier, []
        return None, [
            f"recall would take {readable(needed)} of host memory for {tokens:,} tokens, and may "
            f"take {readable(limit)}: what is dropped is forgotten; --recall-bits 4 takes a "
            "quarter, --recall-limit sets another limit"
        ]

    def _require_known(self, ids: list[int]) -> None:
        vocab = self.model.shape.vocab
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab:
                raise SettingError(
                    f"token {token} is not in this model's vocabulary of {vocab:,}: encode the "
                    "text with its own tokenizer"
                )

    def _within_context(self, longest: int) -> int:
        limit = self.model.shape.max_context
        total = self.cache.seen + len(self.ids)
        if total >= limit + (longest == 0):
            raise ContextError(
                f"{total:,} tokens do not fit this model, which was trained for {limit:,}: "
                "ask about a part of the document, split it, or use a model with a longer "
                "context (--model)"
            )
        return min(longest, limit - total)

    def read(self, progress: Progress | None, cancel: Event | None) -> None:
        """Read all tokens, or none.

        Raises:
            Stopped: `cancel` was set.
        """
        device, known = self.model.device, len(self.context) - len(self.again)
        with self.meter.watch():
            self.logits = prefill(
                self.model,
                self.cache,
                torch.tensor([self.again + self.ids], device=device),
                self.rules,
                context=torch.tensor([self.context[:known]], dtype=torch.int64, device=device),
                tier=self.tier,
                reserve=self.longest,
                chunk=self.settings.chunk,
                progress=progress,
                cancel=cancel,
            )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.context += self.ids
        self.read_s = perf_counter() - self.started

    def answer(self, *, ignore_eos: bool, cancel: Event | None) -> Generator[Piece]:
        """Draw tokens until the model ends, a stop string, the length limit, or `cancel`."""
        sampler = Sampler(self.settings, self.model.device)
        text = TextStream(self.model.tokenizer, self.settings.stop)
        recall = None if self.tier is None else Recall(self.tier, self.settings.recall_entries)
        ends = frozenset() if ignore_eos else self.model.stop_ids
        while True:
            token = sampler(self.logits, self.context)
            self.pending = [token]
            self.generated += 1
            self.last_s = perf_counter() - self.started
            self.first_s = self.first_s or self.last_s
            shown = "" if token in ends else text.push(token)
            reason = self._reason(token in ends or text.stopped, cancel)
            if reason is not None:
                yield Piece(token, shown + text.flush(), self.ledger(reason))
                return
            yield Piece(token, shown, self.ledger(None))
            step = torch.tensor([token], device=self.model.device)
            with self.meter.watch():
                self.logits = decode_step(self.model, self.cache, step, self.rules, recall)
            self.context.append(token)
            self.pending = []

    def _reason(self, ended: bool, cancel: Event | None) -> FinishReason | None:
        if ended:
            return "stop"
        if cancel is not None and cancel.is_set():
            return "interrupted"
        return "length" if self.generated >= self.longest else None

    def ledger(self, reason: FinishReason | None) -> Ledger:
        """The account as it stands."""
        model, cache = self.model, self.cache
        decoding = self.last_s - self.first_s
        return Ledger(
            finish_reason=reason,
            notes=self.notes,
            model=self.settings.model,
            device=str(model.device),
            weights=model.weights.name,
            dtype=str(model.dtype).removeprefix("torch."),
            method=self.method.spec,
            kv_bits=written(self.rules[0].bits),
            budget=self.budget,
            prompt_tokens=len(self.ids),
            seen_tokens=cache.seen,
            generated_tokens=self.generated,
            kept_entries_mean=cache.entries_mean,
            kv_bytes=cache.nbytes,
            index_bytes=0 if self.tier is None else self.tier.index_bytes,
            tier_bytes=0 if self.tier is None else self.tier.nbytes,
            full_kv_bytes=model.shape.full_kv_bytes(cache.seen, model.dtype.itemsize),
            peak_bytes=self.meter.peak_bytes,
            time_to_first_token_s=self.first_s,
            prefill_tokens_per_s=len(self.ids) / self.read_s,
            decode_tokens_per_s=(self.generated - 1) / decoding if decoding > 0 else 0.0,
        )
