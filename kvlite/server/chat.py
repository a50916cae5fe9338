"""`/v1/chat/completions`."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from kvlite.server.chances import chat_logprobs
from kvlite.server.fields import Chat
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import Ask, ServedModel, Token
from kvlite.server.usage import Choice, Usage, gathered, message_ids

_TOP = 20


class ChatAnswer:
    """The answer to one request, whole or piece by piece."""

    def __init__(self, model: ServedModel, request: Chat, ask: Ask) -> None:
        self.model, self.request, self.ask = model, request, ask
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time())}
        self._tokenizer = model.ready().tokenizer

    @classmethod
    async def of(cls, model: ServedModel, request: Chat) -> "ChatAnswer":
        """For a request, which is checked and encoded.

        Raises:
            Refusal, KvliteError: it cannot be answered.
        """
        model.require_name(request.model)
        request.require_here()
        runner = model.ready()
        settings = await asyncio.to_thread(request.settings, runner.settings)
        messages = [each.plain(number) for number, each in enumerate(request.messages)]
        top = _top(request)
        ids = await message_ids(model, messages)
        return cls(model, request, Ask(ids, settings, request.choices, top))

    async def whole(self) -> dict[str, Any]:
        """The completion object."""
        choices, usage = await gathered(self.model, self.ask)
        return {
            **self._head,
            "object": "chat.completion",
            "model": self.model.names[0],
            "system_fingerprint": None,
            "choices": [self._choice(index, each) for index, each in enumerate(choices)],
            "usage": usage.plain(),
        }

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Chunks, and sentences for those who wait."""
        usage, begun = Usage(self.model.names[0], len(self.ask.ids)), set[int]()
        async with aclosing(self.model.answer(self.ask)) as tokens:
            async for token in tokens:
                if token.piece is None:
                    yield token.waiting
                    continue
                usage.add(token)
                if token.choice not in begun:
                    begun.add(token.choice)
                    yield self._chunk(token.choice, {"role": "assistant", "content": ""})
                found = self._logprobs(token)
                if token.piece.text or found is not None:
                    yield self._chunk(token.choice, {"content": token.piece.text}, logprobs=found)
                if (reason := usage.reason(token)) is not None:
                    yield self._chunk(token.choice, {}, reason)
        if self.request.with_usage:
            yield self._chunks([], usage.plain())

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = None
        if self.ask.top is not None:
            found = chat_logprobs(self._tokenizer, self.model.shown_chances(choice.tokens))
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        said = {"message": message, "logprobs": found, "finish_reason": choice.reason}
        return {"index": index, **said}

    def _logprobs(self, token: Token) -> dict[str, Any] | None:
        shown = self.model.shown_chances([token])
        return chat_logprobs(self._tokenizer, shown) if shown else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        said = {"delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunks([{"index": index, **said}], None)

    def _chunks(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        head = {**self._head, "object": "chat.completion.chunk", "model": self.model.names[0]}
        chunk = {**head, "system_fingerprint": None, "choices": choices}
        return chunk | ({"usage": usage} if self.request.with_usage else {})


def _top(request: Chat) -> int | None:
    """How many likeliest tokens are wanted; None for no log probabilities."""
    if not request.logprobs:
        if request.top_logprobs:
            raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    top = request.top_logprobs or 0
    if not 0 <= top <= _TOP:
        raise Refusal(f"top_logprobs {top} is not between 0 and {_TOP}", param="top_logprobs")
    return top
