"""Ollama's API: its requests as those of a chat, and answers in its words."""

import asyncio
import logging
import re
import time
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any

from kvlite.config.checked_file import Damaged, from_json
from kvlite.model.answers.reader import Part, calls_in
from kvlite.server.chat import asked
from kvlite.server.fields import Chat, Named, ignored, parsed
from kvlite.server.messages import Fields, ToolCall, plain_messages
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import ServedModel
from kvlite.server.tools import call_id
from kvlite.server.usage import Usage, heard_of
from kvlite.server.values import Whole

_LOG = logging.getLogger("kvlite.server")
# Fields of chats, and what they are here.
_WORDS = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
}
_WORD = re.compile("|".join(_WORDS))


class Options(Fields):
    """How an answer is chosen."""

    num_predict: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def of_chat(self) -> dict[str, Any]:
        """As fields of a chat."""
        given = self.model_dump(exclude_none=True)
        most, penalty = given.pop("num_predict", None), given.pop("repeat_penalty", None)
        most = -1 if most == -2 else most  # until the model ends it, or its context is full
        return {**given, "max_tokens": most, "repetition_penalty": penalty}


class OllamaAsked(Named):
    """Fields of every request for an answer."""

    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    kvlite: dict[str, Any] | None = None

    def chat(self) -> Chat | None:
        """The request as one for the next message of a chat; None if it asks for nothing. Raises
        Refusal if a field says what cannot be done here."""
        if not (messages := self.told()):
            return None
        given: dict[str, Any] = {"messages": messages, "response_format": self._followed()}
        if self.options:
            if without := ignored(Options, self.options):
                _LOG.info("options that mean nothing here: %s", ", ".join(without))
            given |= parsed(Options, self.options).of_chat()
        thinks = "enable_thinking" if isinstance(self.think, bool) else "reasoning_effort"
        given[thinks] = self.think or (False if self.think is False else None)
        given |= {"tools": getattr(self, "tools", None) or None, "kvlite": self.kvlite}
        return parsed(Chat, {name: each for name, each in given.items() if each is not None})

    @abstractmethod
    def told(self) -> list[dict[str, Any]]:
        """The messages of a chat. Raises Refusal if one has more than text."""

    @abstractmethod
    def said(self, content: str, thinking: str, calls: Any) -> dict[str, Any]:
        """What one line of the answer has of it."""

    def _followed(self) -> dict[str, Any] | None:
        if isinstance(self.format, dict) and self.format:
            return {"type": "json_schema", "json_schema": {"schema": self.format}}
        if self.format in (None, ""):
            return None
        if self.format not in ("json", {}):
            raise Refusal(f"format {str(self.format)[:40]!r} is not json or a JSON Schema")
        return {"type": "json_object"}


class OllamaMessage(Fields):
    """A message of a chat."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChat(OllamaAsked):
    """A request for the next message of a chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[Any] | None = None

    def told(self) -> list[dict[str, Any]]:
        """Calls have ids, which some templates need, and results those of the calls they are of:
        the first one of the tool that has none yet."""
        made, open_calls = list[dict[str, Any]](), defaultdict[str, deque[str]](deque)
        for number, each in enumerate(self.messages or ()):
            _require_no_images(each.images, f"messages[{number}].images")
            content = each.content or ""
            message: dict[str, Any] = {"role": each.role, "content": content}
            if each.thinking:
                message["reasoning_content"] = each.thinking
            for call in each.tool_calls or ():
                plain = {**call.plain(), "id": call.id or call_id()}
                open_calls[call.function.name].append(plain["id"])
                message.setdefault("tool_calls", []).append(plain)
            if each.role == "tool":
                waiting = open_calls[each.tool_name or ""]
                found = waiting.popleft() if waiting else None
                message |= {"name": each.tool_name, "tool_call_id": each.tool_call_id or found}
            made.append(message)
        return made

    def said(self, content: str, thinking: str, calls: Any) -> dict[str, Any]:
        """As of any request."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= {"thinking": thinking} if thinking else {}
        return {"message": message | ({"tool_calls": calls} if calls else {})}


class OllamaGenerate(OllamaAsked):
    """A request for the answer to one prompt."""

    prompt: str | None = None
    system: str | None = None
    images: list[Any] | None = None
    suffix: str | None = None
    template: str | None = None
    raw: bool | None = None
    context: list[Any] | None = None

    def told(self) -> list[dict[str, Any]]:
        """A message of the user, after one of the system if there is one."""
        _require_no_images(self.images, "images")
        for name, instead in (
            ("suffix", "leave it out"),
            ("template", "leave it out: the model's own is used"),
            ("raw", "send the prompt to /v1/completions"),
            ("context", "send the messages to /api/chat"),
        ):
            if getattr(self, name):
                raise Refusal(f"{name} is not supported: {instead}")
        if not self.prompt:
            return []
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    def said(self, content: str, thinking: str, calls: Any) -> dict[str, Any]:
        """As of any request."""
        return {"response": content, **({"thinking": thinking} if thinking else {})}


def _require_no_images(images: Sequence[Any] | None, where: str) -> None:
    if images:
        raise Refusal(f"{where}: this server reads text alone, leave images out")


class OllamaAnswer:
    """The answer to one request, whole or line by line."""

    def __init__(self, model: ServedModel, fields: OllamaAsked, began: float) -> None:
        """For a request that came at a time, by `time.monotonic`."""
        self._model, self._fields, self._began = model, fields, began
        self._loaded = time.monotonic()

    async def lines(self) -> AsyncGenerator[dict[str, Any]]:
        """Pieces of the answer as they come, the last of which is `done`. Raises Refusal or
        KvliteError if it cannot be answered."""
        try:
            request = await asyncio.to_thread(self._fields.chat)
            if request is None:  # a model that is asked for nothing is to be loaded
                yield self._line() | {"done": True, "done_reason": "load"}
                return
            request.require_here()
            messages = await asyncio.to_thread(plain_messages, request.messages)
            ask, new_reader = await asked(self._model, request, messages, None)
        except Refusal as error:
            said = _WORD.sub(lambda found: _WORDS[found[0]], str(error))
            raise Refusal(said, error.status, error.param, error.code) from None
        usage, reason, held = Usage(self._model.names[0], len(ask.ids)), "stop", list[Part]()
        first: float | None = None
        async with aclosing(heard_of(self._model, ask, usage, new_reader)) as answer:
            async for heard in answer:
                if heard.token.piece is None:
                    yield self._line()  # for whoever hangs up on silence
                    continue
                first = time.monotonic() if first is None else first
                reason = heard.reason or reason
                for part in heard.parts:
                    if held and part.kind != "arguments":
                        yield self._line(calls=_calls(held))
                        held = []
                    if part.kind in ("name", "arguments"):
                        held.append(part)
                    else:
                        is_thought = part.kind == "reasoning"
                        yield self._line(**{"thinking" if is_thought else "content": part.text})
        if held:
            yield self._line(calls=_calls(held))
        now = time.monotonic()
        took = {
            "total_duration": now - self._began,
            "load_duration": self._loaded - self._began,
            "prompt_eval_duration": usage.first_s,
            "eval_duration": now - (now if first is None else first),
        }
        yield self._line() | {
            "done": True,
            "done_reason": reason,
            "prompt_eval_count": usage.prompt,
            "eval_count": usage.generated,
            **{name: max(1, round(1e9 * seconds)) for name, seconds in took.items()},
            **({"kvlite": {"notes": usage.notes}} if usage.notes else {}),
        }

    async def whole(self) -> dict[str, Any]:
        """All of it at once."""
        content, thinking, calls, last = "", "", list[Any](), dict[str, Any]()
        async with aclosing(self.lines()) as lines:
            async for last in lines:
                said = last.get("message", last)
                content += said.get("content", last.get("response", ""))
                thinking += said.get("thinking", "")
                calls += said.get("tool_calls", ())
        return last | self._fields.said(content, thinking, calls)

    def _line(self, content: str = "", thinking: str = "", calls: Any = ()) -> dict[str, Any]:
        head = {"model": self._fields.model or self._model.names[0], "created_at": iso_now()}
        return {**head, **self._fields.said(content, thinking, calls), "done": False}


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Calls whose arguments are whole, which Ollama has as objects."""
    made = list[dict[str, Any]]()
    for name, arguments in calls_in(parts):
        plain = None
        with suppress(Damaged):
            plain = from_json(arguments or "{}")
        if isinstance(plain, dict):
            made.append({"id": call_id(), "function": {"name": name, "arguments": plain}})
        else:
            _LOG.info("a call of a tool is left out, as the answer was cut in its midst")
    return made


def iso_now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat()
