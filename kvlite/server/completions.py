"""`/v1/completions`: a text, or its tokens, goes on; and how likely its own tokens were."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any
from uuid import uuid4

from kvlite.conversation.record import StoredMessage
from kvlite.model.text_limit import too_long
from kvlite.server.chances import Chances, token_bytes, token_key
from kvlite.server.fields import Completion
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import Ask, ServedModel
from kvlite.server.shown_chances import Offsets
from kvlite.server.usage import Choice, Usage, gathered, heard_of, prompt_ids

# As OpenAI has it: where a request does not say how long its answer may be.
_LONGEST = 16
_TOP, _PROMPTS = 20, 128


class CompletionAnswer:
    """The answer to one request, whole or piece by piece."""

    def __init__(self, model: ServedModel, request: Completion, asks: list[Ask]) -> None:
        self.model, self.request, self.asks = model, request, asks
        head = {"id": f"cmpl-{uuid4().hex}", "object": "text_completion"}
        self._head = {**head, "created": int(time.time()), "model": model.names[0]}
        self._tokenizer = model.ready().tokenizer

    @classmethod
    async def of(cls, model: ServedModel, request: Completion) -> "CompletionAnswer":
        """For a request; raises Refusal or KvliteError if it cannot be answered."""
        request.require_here()
        runner = model.ready()
        echo = bool(request.echo)
        settings = await model.state.waited_for(partial(request.settings, runner.settings))
        if getattr(request, request.length_field) is None:
            settings["max_new_tokens"] = _LONGEST
        wanted = request.logprobs
        top = None if wanted is None or wanted is False else int(wanted)
        if top is not None and not 0 <= top <= _TOP:
            raise Refusal(f"logprobs {top} is not between 0 and {_TOP}", param="logprobs")
        prompts = request.prompts()
        if len(prompts) > _PROMPTS:
            raise Refusal(f"there are {len(prompts)} prompts: {_PROMPTS} at most", param="prompt")
        scored, empty = echo and top is not None, request.longest == 0
        answers = not (empty and echo)
        asks = [
            Ask(
                *(await _ids(model, each), settings, request.choices, top, scored, answers, empty),
                said=[StoredMessage("user", each)] if isinstance(each, str) else [],
            )
            for each in prompts
        ]
        return cls(model, request, asks)

    async def whole(self) -> dict[str, Any]:
        """The completion object."""
        usage, plain = self._usage(), list[dict[str, Any]]()
        for ask in self.asks:
            choices, own = await gathered(self.model, ask)
            usage.join(own)
            plain += [self._choice(len(plain) + at, ask, each) for at, each in enumerate(choices)]
        return {**self._head, "choices": plain, "usage": usage.plain()}

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Chunks, and sentences for those who wait."""
        usage = self._usage()
        for number, ask in enumerate(self.asks):
            own = Usage(self.model.names[0], len(ask.ids))
            offsets = [Offsets() for _ in range(ask.choices)]
            first = number * ask.choices
            if self.request.echo and not ask.scored:
                for chunk in self._echoed(first, ask):
                    yield chunk
            async with aclosing(heard_of(self.model, ask, own)) as answer:
                async for heard in answer:
                    token = heard.token
                    if token.prompt:
                        for chunk in self._echoed(first, ask, token.prompt, offsets):
                            yield chunk
                    elif token.piece is None:
                        yield token.waiting
                    elif heard.chances or heard.text or heard.reason:
                        found = None
                        if heard.chances:
                            found = self._logprobs(heard.chances, offsets[token.choice])
                        yield self._chunk(first + token.choice, heard.text, heard.reason, found)
            usage.join(own)
        if self.request.with_usage:
            yield {**self._head, "choices": [], "usage": usage.plain()}

    def _usage(self) -> Usage:
        return Usage(self.model.names[0], sum(len(ask.ids) for ask in self.asks))

    def _echoed(
        self,
        first: int,
        ask: Ask,
        found: Sequence[Chances] = (),
        offsets: Sequence[Offsets] = (),
    ) -> Iterator[dict[str, Any]]:
        reason = None if ask.answers else "length"
        for at in range(ask.choices):
            logprobs = self._logprobs(found, offsets[at]) if found else None
            yield self._chunk(first + at, self._text(ask.ids), reason, logprobs)

    def _choice(self, index: int, ask: Ask, choice: Choice) -> dict[str, Any]:
        text, found = choice.text, None
        if ask.top is not None:
            found = self._logprobs([*choice.prompt, *choice.chances], Offsets())
        if self.request.echo:
            text = self._text(ask.ids) + text
        reason = choice.reason if ask.answers else "length"
        return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}

    def _text(self, ids: Any) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def _logprobs(self, found: Sequence[Chances], offsets: Offsets) -> dict[str, Any]:
        """As completions have them: a first token of a prompt follows nothing, and has none."""
        ids = [each.own.token_id for each in found]
        return {
            "tokens": [token_key(self._tokenizer, each) for each in ids],
            "token_logprobs": [each.own.logprob for each in found],
            "top_logprobs": [self._best(each) for each in found],
            "text_offset": [offsets.next(token_bytes(self._tokenizer, each)) for each in ids],
        }

    def _best(self, chances: Chances) -> dict[str, float] | None:
        if chances.own.logprob is None:
            return None
        found = dict[str, float]()
        for each in {each.token_id: each for each in (*chances.best, chances.own)}.values():
            key = token_key(self._tokenizer, each.token_id)
            key = f"token_id:{each.token_id}" if key in found else key  # as vLLM writes it
            found[key] = each.logprob or 0.0
        return found

    def _chunk(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        said = {"text": text, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "choices": [{"index": index, **said}]}
        return chunk | ({"usage": None} if self.request.with_usage else {})


async def _ids(model: ServedModel, prompt: str | list[int]) -> list[int]:
    """A prompt's tokens. A text may spell control tokens: its sender writes all of it."""
    runner = model.ready()
    if isinstance(prompt, str):
        encode = partial(runner.tokenizer.encode, prompt)
        return await prompt_ids(model, encode, prompt)
    if not prompt:
        raise Refusal("a prompt is empty: send some text", param="prompt")
    if len(prompt) > runner.shape.max_context:
        raise too_long(len(prompt), runner.shape.max_context)
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < runner.shape.vocab:
            said = f"token {token} is not in this model's vocabulary of {runner.shape.vocab:,}"
            raise Refusal(said, param="prompt")
    return prompt
