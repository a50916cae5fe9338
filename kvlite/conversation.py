"""A conversation: what was read and answered, on one cache that stays compressed."""

from collections.abc import Iterator, Sequence
from threading import Event
from time import perf_counter
from typing import Any

import torch

from kvlite.cache import KVCache
from kvlite.engine.decode import decode_step
from kvlite.engine.prefill import Progress, prefill
from kvlite.engine.sampling import Sampler
from kvlite.engine.text import TextStream
from kvlite.errors import ContextError, SettingError
from kvlite.ledger import Answer, FinishReason, Ledger, Piece
from kvlite.memory.meter import PeakMeter
from kvlite.methods import Method, parse_method
from kvlite.methods.amount import Amount, check_fit, parse_amount
from kvlite.methods.rules import Rule, layer_rules
from kvlite.model.load import LoadedModel
from kvlite.settings import Settings


class Conversation:
    """Turns of one conversation. Not safe for use from several threads at once.

    Attributes:
        cache: keys and values held.
        token_ids: every token in the cache, in order; an answer's last one follows with the
            next turn.
        messages: the turns that went through the chat template.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        """Start empty.

        Raises:
            SettingError: the method or the budget is not one, or they do not fit each other.
        """
        self.model = model
        self.settings = settings
        self.token_ids: list[int] = []
        self.messages: list[dict[str, str]] = []
        self._unread: list[int] = []
        self._configure(settings)
        self.cache = self._empty_cache()

    def _configure(self, settings: Settings) -> None:
        self.method: Method = parse_method(settings.method)
        self.amount: Amount = parse_amount(settings.budget)
        check_fit(self.method, self.amount)
        self.settings = settings

    def _empty_cache(self) -> KVCache:
        shape = self.model.shape
        return KVCache.empty(
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            dtype=self.model.dtype,
            device=self.model.device,
        )

    def read(
        self,
        content: str | Sequence[int],
        *,
        progress: Progress | None = None,
        stop: Event | None = None,
    ) -> None:
        """Read text or token ids without answering.

        Args:
            content: taken as it is; no chat template is applied.
            progress, stop: as in `engine.prefill.prefill`.

        Raises:
            ContextError: it does not fit the model's trained context.
            Stopped: `stop` was set; nothing of it was read.
        """
        if isinstance(content, str):
            content = self._encoded(content, special=not self.token_ids)
        ids = list(content)
        turn = _Turn(self, self._unread + ids, 0)
        with turn.meter.watch():
            turn.read(progress, stop)

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        progress: Progress | None = None,
        stop: Event | None = None,
        **settings: Any,
    ) -> Answer:
        """Read `token_ids` (at least one) and answer.

        Args:
            max_new_tokens: the longest answer; None as the settings say.
            ignore_eos: go on past the model's end-of-text tokens.
            progress, stop: as in `engine.prefill.prefill`; `stop` also ends the answer.
            settings: change this conversation's settings from here on.

        Raises:
            ContextError, SettingError, Stopped: as in `stream`.
        """
        if max_new_tokens is not None:
            settings["max_new_tokens"] = max_new_tokens
        pieces = self.stream_tokens(
            token_ids, ignore_eos=ignore_eos, progress=progress, stop=stop, **settings
        )
        return joined(pieces)

    def stream(
        self,
        text: str,
        *,
        progress: Progress | None = None,
        stop: Event | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Say `text` as the user, in the model's chat template, and stream the answer.

        Raises:
            ContextError: it does not fit the model's trained context; nothing was read.
            SettingError: a setting is unknown or out of range.
            Stopped: `stop` was set while reading; nothing was read.
        """
        message = {"role": "user", "content": text}
        ids = self._turn_ids([*self.messages, message])
        answer = ""
        for piece in self.stream_tokens(ids, progress=progress, stop=stop, **settings):
            answer += piece.text
            yield piece
        self.messages += [message, {"role": "assistant", "content": answer}]

    def stream_tokens(
        self,
        token_ids: Sequence[int],
        *,
        ignore_eos: bool = False,
        progress: Progress | None = None,
        stop: Event | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Read token ids and stream the answer; `stream` without the chat template."""
        if not token_ids:
            raise SettingError("there is nothing to answer: give at least one token")
        if settings:
            self._configure(self.settings.replace(settings))
        turn = _Turn(self, self._unread + list(token_ids), self.settings.max_new_tokens)
        with turn.meter.watch():
            turn.read(progress, stop)
        yield from turn.answer(ignore_eos, stop)

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.model.tokenizer.encode(text, add_special_tokens=special)
        return ids

    def _turn_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens that a new user message adds to what has been read."""
        tokenizer, said = self.model.tokenizer, messages[:-1]
        if tokenizer.chat_template is None:
            return self._encoded(messages[-1]["content"], special=not self.token_ids)
        text = _rendered(tokenizer, messages)
        if not said:
            return self._encoded(text, special=False)
        known = _rendered(tokenizer, said[:-1]) + said[-1]["content"]
        if text.startswith(known):
            # The template closes the answer itself.
            self._unread = [i for i in self._unread if i not in self.model.stop_ids]
            return self._encoded(text[len(known) :], special=False)
        # The template rewrote the past: read it anew.
        self.cache, self.token_ids, self._unread = self._empty_cache(), [], []
        return self._encoded(text, special=False)


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def joined(pieces: Iterator[Piece]) -> Answer:
    """The whole answer of a stream of pieces."""
    kept = list(pieces)
    return Answer(
        "".join(piece.text for piece in kept),
        [piece.token_id for piece in kept],
        kept[-1].ledger,
    )


class _Turn:
    """One reading and its answer: what they share, and their clock."""

    def __init__(self, conversation: Conversation, ids: list[int], longest: int) -> None:
        self.talk = conversation
        model, cache, settings = conversation.model, conversation.cache, conversation.settings
        self.ids = ids
        self.longest = self._within_context(longest)
        seen = cache.seen + len(ids)
        itemsize = model.dtype.itemsize
        method = conversation.method
        self.budget = conversation.amount.resolve(model.shape, method, seen, itemsize)
        if self.budget < seen:
            method.check(self.budget)
        self.rules: list[Rule] = layer_rules(method, model.shape, self.budget, seen)
        self.rotations = model.rotations(cache.seen, len(ids) + self.longest)
        self.meter = PeakMeter(settings.measure, model.device, model.module.parameters())
        self.generated: list[int] = []
        self.started = perf_counter()
        self.read_s = 0.0
        self.first_s = 0.0
        self.last_s = 0.0

    def _within_context(self, longest: int) -> int:
        limit = self.talk.model.shape.max_context
        total = self.talk.cache.seen + len(self.ids)
        if total >= limit + (longest == 0):
            raise ContextError(
                f"{total:,} tokens do not fit this model, which was trained for {limit:,}: "
                "ask about a part of the document, split it, or use a model with a longer "
                "context (--model)"
            )
        return min(longest, limit - total)

    def read(self, progress: Progress | None, stop: Event | None) -> None:
        talk = self.talk
        self.logits = prefill(
            talk.model,
            talk.cache,
            torch.tensor([self.ids], device=talk.model.device),
            self.rules,
            self.rotations,
            reserve=self.longest,
            chunk=talk.settings.chunk,
            progress=progress,
            stop=stop,
        )
        if talk.model.device.type == "cuda":
            torch.cuda.synchronize(talk.model.device)
        talk.token_ids += self.ids
        talk._unread = []
        self.read_s = perf_counter() - self.started

    def answer(self, ignore_eos: bool, stop: Event | None) -> Iterator[Piece]:
        talk, settings = self.talk, self.talk.settings
        model = talk.model
        sampler = Sampler(settings, model.device)
        text = TextStream(model.tokenizer, settings.stop)
        first = talk.cache.seen - len(self.ids)
        ends = frozenset() if ignore_eos else model.stop_ids
        while True:
            token = sampler(self.logits, talk.token_ids)
            self.generated.append(token)
            talk._unread = [token]
            self.last_s = perf_counter() - self.started
            self.first_s = self.first_s or self.last_s
            shown = "" if token in ends else text.push(token)
            reason = self._reason(token in ends or text.stopped, stop)
            if reason is not None:
                yield Piece(token, shown + text.flush(), self.ledger(reason))
                return
            yield Piece(token, shown, self.ledger(None))
            at = talk.cache.seen - first
            rotation = [(cos[:, at : at + 1], sin[:, at : at + 1]) for cos, sin in self.rotations]
            with self.meter.watch():
                self.logits = decode_step(
                    model,
                    talk.cache,
                    torch.tensor([token], device=model.device),
                    self.rules,
                    rotation,
                )
            talk.token_ids.append(token)

    def _reason(self, ended: bool, stop: Event | None) -> FinishReason | None:
        if ended:
            return "stop"
        if stop is not None and stop.is_set():
            return "interrupted"
        return "length" if len(self.generated) >= self.longest else None

    def ledger(self, reason: FinishReason | None) -> Ledger:
        talk, model = self.talk, self.talk.model
        count = len(self.generated)
        decoding = self.last_s - self.first_s
        return Ledger(
            finish_reason=reason,
            model=talk.settings.model,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            method=talk.method.spec,
            budget=self.budget,
            prompt_tokens=len(self.ids),
            seen_tokens=talk.cache.seen,
            generated_tokens=count,
            kept_entries_mean=talk.cache.entries_mean,
            kv_bytes=talk.cache.nbytes,
            full_kv_bytes=model.shape.full_kv_bytes(talk.cache.seen, model.dtype.itemsize),
            peak_bytes=self.meter.peak_bytes,
            time_to_first_token_s=self.first_s,
            prefill_tokens_per_s=len(self.ids) / self.read_s,
            decode_tokens_per_s=(count - 1) / decoding if decoding > 0 else 0.0,
        )
