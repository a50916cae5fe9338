"""`/v1/responses`: chat in the newer of OpenAI's two ways; what was said is kept."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from kvlite.server.fields import ResponseRequest
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import Ask, ServedModel
from kvlite.server.usage import Usage, gathered, message_ids

# Responses whose messages are remembered, and characters of all of them.
_RESPONSES, _CHARACTERS = 1000, 64 << 20

Messages = list[dict[str, str]]


class SaidBefore:
    """What was said up to earlier responses, in memory; the oldest go first."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, Messages] = OrderedDict()
        self._characters = 0

    def of(self, response: str | None) -> Messages:
        """What was said up to a response; nothing before the first.

        Raises:
            Refusal: it is not known.
        """
        if response is None:
            return []
        if response not in self._said:
            said = f"there is no response {response[:100]!r} here (any more): send all messages"
            raise Refusal(said, 404, "previous_response_id", "previous_response_not_found")
        self._said.move_to_end(response)
        return self._said[response]

    def add(self, response: str, messages: Messages) -> None:
        """Remember what was said up to a response."""
        self._said[response] = messages
        self._characters += _length(messages)
        while len(self._said) > _RESPONSES or self._characters > _CHARACTERS:
            self._characters -= _length(self._said.popitem(last=False)[1])


class ResponseAnswer:
    """The answer to one request, whole or event by event."""

    def __init__(
        self,
        model: ServedModel,
        request: ResponseRequest,
        ask: Ask,
        said: SaidBefore,
        own: Messages,
    ) -> None:
        self.model, self.request, self.ask = model, request, ask
        self._said, self._messages = said, own
        self._id, self._item = f"resp_{uuid4().hex}", f"msg_{uuid4().hex}"
        self._created, self._number = int(time.time()), -1

    @classmethod
    async def of(
        cls, model: ServedModel, request: ResponseRequest, said: SaidBefore
    ) -> "ResponseAnswer":
        """For a request, which is checked and encoded.

        Raises:
            Refusal, KvliteError: it cannot be answered.
        """
        model.require_name(request.model)
        request.require_here()
        settings = await asyncio.to_thread(request.settings, model.ready().settings)
        if request.choices > 1:
            raise Refusal("a response is one answer: leave n out", param="n")
        own = [*said.of(request.previous_response_id), *request.messages()]
        told = [{"role": "system", "content": request.instructions or ""}]
        ids = await message_ids(model, [*(told if request.instructions else []), *own])
        return cls(model, request, Ask(ids, settings), said, own)

    async def whole(self) -> dict[str, Any]:
        """The response object."""
        (choice,), usage = await gathered(self.model, self.ask)
        self._keep(choice.text)
        return self._response(_ended(choice.reason), choice.text, usage)

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Events, and sentences for those who wait."""
        usage = Usage(self.model.names[0], len(self.ask.ids))
        text, reason, begun = "", "stop", False
        async with aclosing(self.model.answer(self.ask)) as tokens:
            async for token in tokens:
                if token.piece is None:
                    yield token.waiting
                    continue
                if not begun:
                    begun = True
                    for event in self._beginning():
                        yield event
                usage.add(token)
                reason = usage.reason(token) or reason
                text += token.piece.text
                if token.piece.text:
                    yield self._of_part("output_text.delta", delta=token.piece.text, logprobs=[])
        self._keep(text)
        yield self._of_part("output_text.done", text=text, logprobs=[])
        yield self._of_part("content_part.done", part=_part(text))
        yield self._of_item("done", self._message("completed", [_part(text)]))
        status = _ended(reason)
        yield self._event(status, response=self._response(status, text, usage))

    def _beginning(self) -> list[dict[str, Any]]:
        empty = self._response("in_progress", None, None)
        return [
            self._event("created", response=empty),
            self._event("in_progress", response=empty),
            self._of_item("added", self._message("in_progress", [])),
            self._of_part("content_part.added", part=_part("")),
        ]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def _of_item(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(f"output_item.{kind}", output_index=0, item=item)

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        kind = {"id": self._item, "type": "message", "role": "assistant"}
        return {**kind, "status": status, "content": content}

    def _keep(self, text: str) -> None:
        if self.request.store is not False:
            answer = {"role": "assistant", "content": text}
            self._said.add(self._id, [*self._messages, answer])

    def _response(self, status: str, text: str | None, usage: Usage | None) -> dict[str, Any]:
        request, settings = self.request, self.model.ready().settings
        chosen = settings.replace(self.ask.settings)
        lacking = {"reason": "max_output_tokens"} if status == "incomplete" else None
        output = [] if text is None else [self._message(status, [_part(text)])]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if text is not None else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": lacking,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": self.model.names[0],
            "output": output,
            "parallel_tool_calls": False,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "previous_response_id": request.previous_response_id,
            "reasoning": None,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": chosen.temperature,
            "text": {"format": request.format or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "top_p": chosen.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _counted(usage),
        }


def _ended(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _counted(usage: Usage) -> dict[str, Any]:
    """Usage in the words of this address."""
    plain = usage.plain()
    return {
        "input_tokens": plain["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": plain["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": plain["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": plain["total_tokens"],
        "kvlite": plain["kvlite"],
    }


def _length(messages: Sequence[dict[str, str]]) -> int:
    return sum(len(each["content"]) for each in messages)
