"""`/v1/responses`: chat in the newer of OpenAI's two ways; what was said is kept."""

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from kvlite.model.tool_calls import Call
from kvlite.server.chat import asked
from kvlite.server.fields import ResponseRequest
from kvlite.server.messages import Item, Plain, joined
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import Ask, ServedModel
from kvlite.server.tools import ToolUse, call_id
from kvlite.server.usage import Usage, gathered, parts_of

# Responses whose messages are remembered, and characters of all of them.
_RESPONSES, _CHARACTERS = 1000, 64 << 20

# Fields that a tool has in answers, whether or not the request had them.
_TOOL = {"description": None, "parameters": None, "strict": None}

Messages = list[Plain]


class SaidBefore:
    """What was said up to earlier responses, in memory; the oldest go first."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, Messages] = OrderedDict()
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
        use: ToolUse | None = None,
    ) -> None:
        self.model, self.request, self.ask = model, request, ask
        self._said, self._messages = said, own
        self._use = use
        self._id, self._item = f"resp_{uuid4().hex}", f"msg_{uuid4().hex}"
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
        own = joined([*said.of(request.previous_response_id), *request.messages()])
        told = [{"role": "system", "content": request.instructions}] if request.instructions else []
        ask, use = await asked(model, request, [*told, *own], None)
        return cls(model, request, ask, said, own, use)

    async def whole(self) -> dict[str, Any]:
        """The response object."""
        (choice,), usage = await gathered(self.model, self.ask, self._use)
        text, items = choice.text, [_call_item(*each) for each in choice.calls]
        self._keep(text, items)
        if text or not items:
            items.insert(0, self._message("completed", [_part(text)]))
        return self._response(_ended(choice.reason), items, usage)

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Events, and sentences for those who wait."""
        usage = Usage(self.model.names[0], len(self.ask.ids))
        text, reason, items, begun = "", None, list[dict[str, Any]](), False
        async with aclosing(parts_of(self.model, self.ask, self._use, usage)) as parts:
            async for part in parts:
                if part.token.piece is None:
                    yield part.token.waiting
                    continue
                if not begun:
                    begun, empty = True, self._response("in_progress", [], None)
                    yield self._event("created", response=empty)
                    yield self._event("in_progress", response=empty)
                reason = part.reason
                for event in self._coming(text, part.text, items, part.calls):
                    yield event
                text += part.text
        self._keep(text, items)
        if not items:
            for event in (*([] if text else self._text_begins()), *self._text_ends(text)):
                yield event
        if text or not items:
            items.insert(0, self._message("completed", [_part(text)]))
        status = _ended(reason or "stop")
        yield self._event(status, response=self._response(status, items, usage))

    def _coming(
        self, text: str, more: str, items: list[dict[str, Any]], calls: Sequence[Call]
    ) -> Iterator[dict[str, Any]]:
        """More text, or calls, which are added to the `items`; there was `text` before."""
        if more and not text:
            yield from self._text_begins()
        if more:
            yield self._of_part("output_text.delta", delta=more, logprobs=[])
        text += more
        for call in calls:
            if text and not items:
                yield from self._text_ends(text)
            items.append(_call_item(call_id(), call))
            yield from self._called(items[-1], bool(text) + len(items) - 1)

    def _text_begins(self) -> Iterator[dict[str, Any]]:
        yield self._of_item("added", 0, self._message("in_progress", []))
        yield self._of_part("content_part.added", part=_part(""))

    def _text_ends(self, text: str) -> Iterator[dict[str, Any]]:
        yield self._of_part("output_text.done", text=text, logprobs=[])
        yield self._of_part("content_part.done", part=_part(text))
        yield self._of_item("done", 0, self._message("completed", [_part(text)]))

    def _called(self, item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
        """A call, which comes as a whole."""
        place, said = {"item_id": item["id"], "output_index": index}, item["arguments"]
        empty = {**item, "status": "in_progress", "arguments": ""}
        yield self._of_item("added", index, empty)
        yield self._event("function_call_arguments.delta", **place, delta=said)
        yield self._event(
            "function_call_arguments.done", **place, name=item["name"], arguments=said
        )
        yield self._of_item("done", index, item)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def _of_item(self, kind: str, index: int, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(f"output_item.{kind}", output_index=index, item=item)

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        kind = {"id": self._item, "type": "message", "role": "assistant"}
        return {**kind, "status": status, "content": content}

    def _keep(self, text: str, calls: Sequence[dict[str, Any]]) -> None:
        if self.request.store is not False:
            said = [Item.model_validate(each).plain(0) for each in calls]
            answer = {"role": "assistant", "content": text}
            self._said.add(self._id, joined([*self._messages, answer, *said]))

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        request, settings = self.request, self.model.ready().settings
        chosen = settings.replace(self.ask.settings)
        lacking = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None if usage is None else int(time.time()),
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
            "prompt_cache_key": None,
            "reasoning": None,
            "safety_identifier": None,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": chosen.temperature,
            "text": {"format": request.format or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [{**_TOOL, **each} for each in request.tools or []],
            "top_logprobs": 0,
            "top_p": chosen.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _counted(usage),
        }


def _ended(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _call_item(name: str, call: Call) -> dict[str, Any]:
    kind = {"id": f"fc_{name}", "type": "function_call", "status": "completed"}
    return {**kind, "call_id": name, "name": call.name, "arguments": call.arguments}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _counted(usage: Usage) -> dict[str, Any]:
    plain = usage.plain()
    return {
        "input_tokens": plain["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": plain["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": plain["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": plain["total_tokens"],
        "kvlite": plain["kvlite"],
    }


def _length(messages: Messages) -> int:
    return sum(len(each["content"]) + len(str(each.get("tool_calls", ""))) for each in messages)
