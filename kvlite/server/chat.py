"""`/v1/chat/completions`."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from kvlite import __version__
from kvlite.model.tool_calls import Call
from kvlite.server.chances import chat_logprobs
from kvlite.server.fields import Chat, ResponseRequest
from kvlite.server.files import with_documents
from kvlite.server.messages import Plain, plain_messages
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import Ask, ServedModel, Token
from kvlite.server.tools import ToolUse, call_id, tool_use
from kvlite.server.usage import Choice, Usage, gathered, message_ids, parts_of

_TOP, _FINGERPRINT = 20, f"kvlite-{__version__}"


async def asked(
    model: ServedModel,
    request: Chat | ResponseRequest,
    messages: Sequence[Plain],
    top: int | None,
) -> tuple[Ask, ToolUse | None]:
    """What is asked of a model, and what it may call. Raises Refusal or KvliteError if it cannot be
    answered.

    Args:
        messages: with the ids of documents, whose text is put into them.
        top: as of `Ask`.
    """
    runner = model.ready()
    settings = await asyncio.to_thread(request.settings, runner.settings)
    several = request.parallel_tool_calls is not False
    use = tool_use(runner.tokenizer, request.tools, request.tool_choice, several=several)
    shown: Sequence[dict[str, Any]] = ()
    if use is not None:
        shown, schema = use.shown, settings.get("schema", "")
        settings["schema"] = await asyncio.to_thread(use.grammar, schema)
    told, lent = await asyncio.to_thread(
        with_documents, messages, request.documents, model.state.files
    )
    ids = await message_ids(
        model, told, shown, request.chat_template_kwargs, continues=request.continues
    )
    return Ask(ids, settings, request.choices, top, lent=lent), use


class ChatAnswer:
    """The answer to one request, whole or piece by piece."""

    def __init__(
        self, model: ServedModel, request: Chat, ask: Ask, use: ToolUse | None = None
    ) -> None:
        self.model, self.request, self.ask, self._use = model, request, ask, use
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time())}
        self._tokenizer = model.ready().tokenizer

    @classmethod
    async def of(cls, model: ServedModel, request: Chat) -> "ChatAnswer":
        """For a request; raises Refusal or KvliteError if it cannot be answered."""
        request.require_here()
        ask, use = await asked(model, request, plain_messages(request.messages), _top(request))
        return cls(model, request, ask, use)

    async def whole(self) -> dict[str, Any]:
        """The completion object."""
        choices, usage = await gathered(self.model, self.ask, self._use)
        return {
            **self._head,
            "object": "chat.completion",
            "model": self.model.names[0],
            "system_fingerprint": _FINGERPRINT,
            "choices": [self._choice(index, each) for index, each in enumerate(choices)],
            "usage": usage.plain(),
        }

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Chunks, and sentences for those who wait."""
        usage, made = Usage(self.model.names[0], len(self.ask.ids)), Counter[int]()
        begun = set[int]()
        async with aclosing(parts_of(self.model, self.ask, self._use, usage)) as parts:
            async for part in parts:
                if part.token.piece is None:
                    yield part.token.waiting
                    continue
                index, found = part.token.choice, self._logprobs(part.token)
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(index, {"role": "assistant", "content": ""})
                if part.text or found is not None:
                    yield self._chunk(index, {"content": part.text}, logprobs=found)
                for call in part.calls:
                    for delta in _call_parts(made[index], call):
                        yield self._chunk(index, {"tool_calls": [delta]})
                    made[index] += 1
                if part.reason is not None:
                    yield self._chunk(index, {}, _reason(part.reason, made[index]))
        if self.request.with_usage:
            yield self._chunks([], usage.plain())

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = None
        if self.ask.top is not None:
            found = chat_logprobs(self._tokenizer, self.model.shown_chances(choice.tokens))
        text, calls = choice.text, choice.calls
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= {"refusal": None, "annotations": []}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(*each) for each in calls]}
        reason = _reason(choice.reason, len(calls))
        return {"index": index, "message": message, "logprobs": found, "finish_reason": reason}

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
        chunk = {**head, "system_fingerprint": _FINGERPRINT, "choices": choices}
        return chunk | ({"usage": usage} if self.request.with_usage else {})


def _call(name: str, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": name, "type": "function", "function": function}


def _call_parts(index: int, call: Call) -> list[dict[str, Any]]:
    """A call as streams have it: its name, then its arguments."""
    named = _call(call_id(), Call(call.name, ""))
    return [
        {"index": index, **named},
        {"index": index, "function": {"arguments": call.arguments}},
    ]


def _reason(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason


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
