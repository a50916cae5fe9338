"""`/v1/responses`: chat in the newer of OpenAI's two ways; what was said is kept."""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from kvlite.config.checked_file import from_json
from kvlite.errors import KvliteError, Stopped
from kvlite.model.answers.reader import AnswerReader
from kvlite.server.chances import Chances, chat_logprobs
from kvlite.server.chat import asked, top_of
from kvlite.server.fields import ResponseRequest
from kvlite.server.messages import Plain, joined
from kvlite.server.refusals import Refusal, refusal_of
from kvlite.server.response_input import Item
from kvlite.server.response_items import ItemStream, items_of
from kvlite.server.response_tools import ResponseTools
from kvlite.server.served_model import Ask, ServedModel
from kvlite.server.usage import Usage, gathered, heard_of

_LOG = logging.getLogger("kvlite.server")
# Responses that are remembered, and characters of all of them and of what was said up to them.
_RESPONSES, _CHARACTERS = 1000, 64 << 20

# Fields that a tool has in answers, whether or not the request had them.
_TOOL = {"description": None, "parameters": None, "strict": None}

Messages = list[Plain]


class SaidBefore:
    """Earlier responses, as JSON, and what was said up to them, in memory; the oldest go first."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, tuple[Messages, str]] = OrderedDict()
        self._characters = 0

    def of(self, response: str | None) -> Messages:
        """What was said up to a response; nothing before the first. Raises Refusal if it is not
        known."""
        if response is None:
            return []
        if response not in self._said:
            said = f"there is no response {response[:100]!r} here (any more): send all messages"
            raise Refusal(said, 404, "previous_response_id", "previous_response_not_found")
        self._said.move_to_end(response)
        return self._said[response][0]

    def response(self, response: str) -> dict[str, Any]:
        """A response as it was answered. Raises Refusal if it is not known."""
        if response not in self._said:
            raise Refusal(f"there is no response {response[:100]!r} here (any more)", 404)
        found: dict[str, Any] = from_json(self._said[response][1])
        return found

    def add(self, response: str, messages: Messages, answer: str) -> None:
        """Remember a response, and what was said up to it."""
        self._said[response] = (messages, answer)
        self._characters += _length(messages) + len(answer)
        while len(self._said) > _RESPONSES or self._characters > _CHARACTERS:
            self._forget(next(iter(self._said)))

    def remove(self, response: str) -> dict[str, Any]:
        """Forget a response; what says so. Raises Refusal if it is not known."""
        self.response(response)
        self._forget(response)
        return {"id": response, "object": "response", "deleted": True}

    def _forget(self, response: str) -> None:
        messages, answer = self._said.pop(response)
        self._characters -= _length(messages) + len(answer)


class ResponseAnswer:
    """The answer to one request, whole or event by event."""

    def __init__(
        self,
        model: ServedModel,
        request: ResponseRequest,
        ask: Ask,
        said: SaidBefore,
        own: Messages,
        tools: ResponseTools,
        new_reader: Callable[[], AnswerReader] | None = None,
    ) -> None:
        self.model, self.request, self.ask = model, request, ask
        self._said, self._messages, self._tools = said, own, tools
        self._new_reader, self._usual = new_reader, model.ready().settings
        self._id = f"resp_{uuid4().hex}"
        self._created, self._number = int(time.time()), -1

    @classmethod
    async def of(
        cls, model: ServedModel, request: ResponseRequest, said: SaidBefore
    ) -> "ResponseAnswer":
        """For a request, which is checked and encoded. Raises Refusal or KvliteError if it cannot
        be answered."""
        request.require_here()
        if request.choices > 1:
            raise Refusal("a response is one answer: leave n out", param="n")
        before = said.of(request.previous_response_id)

        def read() -> tuple[ResponseTools, Messages]:
            tools = ResponseTools(request.tools, request.tool_choice)
            return tools, joined([*before, *request.messages(tools.shown)])

        tools, own = await asyncio.to_thread(read)
        told = [{"role": "system", "content": request.instructions}] if request.instructions else []
        needs = 'include: ["message.output_text.logprobs"]'
        top = top_of(request.wants_logprobs, request.top_logprobs, needs)
        flat = {"tools": tools.functions, "tool_choice": tools.choice}
        ask, new_reader = await asked(model, request.model_copy(update=flat), [*told, *own], top)
        return cls(model, request, ask, said, own, tools, new_reader)

    async def whole(self) -> dict[str, Any]:
        """The response object."""
        (choice,), usage = await gathered(self.model, self.ask, self._new_reader)
        found, is_cut = self._logprobs(choice.chances), choice.reason == "length"
        items = items_of(choice.parts, self._tools.named, found, is_cut=is_cut)
        return self._kept(self._response(_ended(choice.reason), items, usage))

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Events, and sentences for those who wait. What goes wrong is raised before the first of
        them, and later is the last event."""
        usage, coming = Usage(self.model.names[0], len(self.ask.ids)), ItemStream(self._tools.named)
        has_begun = False
        try:
            async with aclosing(self._events(usage, coming)) as events:
                async for each in events:
                    yield each
                    has_begun = True
        except Stopped:
            raise
        except Exception as error:
            if not has_begun:
                raise
            if not isinstance(error, KvliteError | Refusal):
                _LOG.error("kvlite went wrong", exc_info=error)
            if self._number < 0:
                for event in self._beginning():
                    yield event
            failed = {"error": _error(refusal_of(error, "/v1/responses"))}
            yield self._event(
                "failed", response=self._response("failed", coming.items, usage) | failed
            )

    async def _events(
        self, usage: Usage, coming: ItemStream
    ) -> AsyncGenerator[dict[str, Any] | str]:
        reason = None
        answer = heard_of(self.model, self.ask, usage, self._new_reader)
        async with aclosing(answer) as tokens:
            async for heard in tokens:
                waits = heard.token.waiting
                if waits:  # also by an event, as some clients wait for these alone
                    yield waits
                if self._number < 0 or waits:
                    for event in self._beginning():
                        yield event
                if heard.token.piece is None:
                    continue
                reason = heard.reason
                for kind, fields in coming.push(heard.parts, self._logprobs(heard.chances)):
                    yield self._event(kind, **fields)
        for kind, fields in coming.flush(is_cut=reason == "length"):
            yield self._event(kind, **fields)
        status = _ended(reason or "stop")
        done = self._kept(self._response(status, coming.items, usage))
        yield self._event(status, response=done)

    def _beginning(self) -> list[dict[str, Any]]:
        """The first two events; after them the second one again, which says nothing new."""
        empty = self._response("in_progress", [], None)
        kinds = ("created", "in_progress") if self._number < 0 else ("in_progress",)
        return [self._event(kind, response=empty) for kind in kinds]

    def _logprobs(self, found: Sequence[Chances]) -> list[dict[str, Any]]:
        return chat_logprobs(self.model.ready().tokenizer, found)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def _kept(self, made: dict[str, Any]) -> dict[str, Any]:
        """A response, which is remembered unless the request wants it not to be."""
        if self.request.store is not False:
            items, shown = made["output"], self._tools.shown
            said = [Item.model_validate(each).plain(0, shown) for each in items]
            self._said.add(self._id, joined([*self._messages, *said]), json.dumps(made))
        return made

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        request, chosen = self.request, self._usual.replace(self.ask.settings)
        lacking = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status in ("completed", "incomplete") else None,
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
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": request.reasoning,
            "safety_identifier": None,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": chosen.temperature,
            "text": {"format": request.format or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_told(each) for each in request.tools or []],
            "top_logprobs": self.ask.top or 0,
            "top_p": chosen.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _counted(usage),
        }


def _ended(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _told(tool: dict[str, Any]) -> dict[str, Any]:
    return {**_TOOL, **tool} if tool.get("type", "function") == "function" else tool


def _error(refusal: Refusal) -> dict[str, Any]:
    """As failed responses have it: programs ask again unless the code says what they did wrong."""
    usual = "server_error" if refusal.status >= 500 else "invalid_prompt"
    return {"code": refusal.code or usual, "message": str(refusal)}


def _counted(usage: Usage) -> dict[str, Any]:
    plain = usage.plain()
    return {
        "input_tokens": plain["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": plain["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": plain["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage.reasoned},
        "total_tokens": plain["total_tokens"],
        "kvlite": plain["kvlite"],
    }


def _length(messages: Messages) -> int:
    parts = ("content", "reasoning_content", "tool_calls")
    return sum(len(str(each.get(part, ""))) for each in messages for part in parts)
