"""`/v1/messages`: Anthropic's API, translated into a chat and back."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar
from uuid import uuid4

from kvlite.model.answers.reader import AnswerReader
from kvlite.server.chat import asked, prompt_of
from kvlite.server.content_blocks import EVENT_BEATS, PING, STILL, TOOL_ID, Blocks, Event
from kvlite.server.fields import Chat, Named, parsed
from kvlite.server.messages import UNSEEN, Fields, Plain, plain_messages
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import Ask, ServedModel
from kvlite.server.usage import Usage, heard_of
from kvlite.server.values import Whole

_LOG = logging.getLogger("kvlite.server")
# How what the client says to the model in the midst of a chat is marked for templates that have one
# system message, at the beginning.
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"adaptive": "enabled", "between_tools": "enabled"}


class Source(Fields):
    """Where a document is."""

    type: str
    data: str | None = None
    file_id: str | None = None
    content: "str | list[Block] | None" = None


class Block(Fields):
    """A part of a message: text, reasoning, a call, what it came to, a document."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[Block] | dict[str, Any] | None" = None
    is_error: bool | None = None
    source: Source | str | None = None
    title: str | None = None

    def said(self, where: str) -> str:
        """It as text. Raises Refusal if it is something else."""
        kind = self.type
        if kind == "text":
            return self.text or ""
        if kind == "tool_reference":
            return f"The tool {self.tool_name or self.name} is here."
        if kind == "search_result":
            return "\n".join(filter(None, (self.title, str(self.source or ""), self.inner(where))))
        if kind == "document" and isinstance(self.source, Source):
            if self.source.type == "text":
                return "\n".join(filter(None, (self.title, self.source.data)))
            if self.source.type == "content":
                inner = Block(type="document", content=self.source.content).inner(where)
                return "\n".join(filter(None, (self.title, inner)))
        if kind == "server_tool_use" or kind.endswith("_tool_result"):
            return str(self.model_dump(exclude_none=True, exclude={"id", "tool_use_id"}))
        said = (
            f"{where} is of type {kind[:40]!r}: this server reads text, and files by the file_id "
            "of an upload"
        )
        raise Refusal(said, code="unsupported_content")

    def inner(self, where: str) -> str:
        """What it holds as text; an image among that is named."""
        if isinstance(self.content, list):
            texts = (UNSEEN if each.type == "image" else each.said(where) for each in self.content)
            return "\n".join(texts)
        return str(self.content or "")


class Message(Fields):
    """A message of a chat."""

    role: str
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        """What it has."""
        if isinstance(self.content, str):
            return [Block(type="text", text=self.content)]
        return self.content


class MessagesRequest(Named):
    """A request for the next message, or for how many tokens it would read."""

    any_model: ClassVar[bool] = True
    messages: list[Message]
    system: str | list[Block] | None = None
    max_tokens: Whole | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    kvlite: dict[str, Any] | None = None

    def chat(self) -> Chat:
        """The same as a request for a chat. Raises Refusal for what this server cannot do."""
        output, choice = self.output_config or {}, self.tool_choice or {}
        given = {
            "messages": [*self._system(), *self._messages()],
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "tools": self._tools(),
            "tool_choice": _chosen(choice),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "thinking": _thinking(self.thinking),
            "reasoning_effort": output.get("effort"),
            "response_format": _format(output.get("format") or self.output_format),
            "kvlite": self.kvlite,
        }
        return parsed(Chat, {name: value for name, value in given.items() if value is not None})

    def _system(self) -> Iterator[dict[str, Any]]:
        blocks = Message(role="system", content=self.system or "").blocks
        texts = [each.said(f"system[{number}]") for number, each in enumerate(blocks)]
        if text := "\n".join(filter(None, texts)):
            yield {"role": "system", "content": text}

    def _messages(self) -> list[dict[str, Any]]:
        made = list[dict[str, Any]]()
        for number, message in enumerate(self.messages):
            where = f"messages[{number}]"
            if message.role == "assistant":
                made.append(_answered(message.blocks, where))
            elif message.role in ("user", "system"):
                _add(made, message, where)
            else:
                said = f"{where}.role {message.role[:40]!r} is neither user nor assistant"
                raise Refusal(said, param="messages")
        return made

    def _tools(self) -> list[dict[str, Any]] | None:
        """Functions; tools that Anthropic's servers run are dropped."""
        given = self.tools or []
        hosted = [each for each in given if each.get("type") not in (None, "custom")]
        names = [str(each.get("name") or each.get("type"))[:60] for each in hosted]
        if (wanted := (self.tool_choice or {}).get("name")) in names:
            said = f"tool_choice: {wanted!r} is run by Anthropic's servers, and not here"
            raise Refusal(said, param="tool_choice")
        if names:
            _LOG.info("tools that Anthropic's servers run are left out: %s", ", ".join(names))
        return [
            {
                "type": "function",
                "function": {
                    "name": each.get("name"),
                    "description": each.get("description"),
                    "parameters": each.get("input_schema"),
                },
            }
            for each in given
            if each not in hosted
        ] or None


class CreateRequest(MessagesRequest):
    """A request for the next message."""

    max_tokens: Whole


def _add(made: list[dict[str, Any]], message: Message, where: str) -> None:
    """Add what the user says, or the client on the way; results of calls come first. What is said
    beside results stands in the last of them: in templates an answer follows a result."""
    results, parts = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, block in enumerate(message.blocks):
        at = f"{where}.content[{number}]"
        if block.type == "tool_result":
            text = f"{'Error: ' if block.is_error else ''}{block.inner(at)}"
            called = (block.tool_use_id or "").removeprefix(TOOL_ID)
            results.append({"role": "tool", "tool_call_id": called, "content": text})
        elif isinstance(block.source, Source) and block.source.type == "file":
            parts.append({"type": "file", "file_id": block.source.file_id})
        else:
            said = block.said(at)
            told = _REMINDER.format(said) if message.role == "system" else said
            parts.append({"type": "text", "text": told})
    texts = [each["text"] for each in parts if each["type"] == "text"]
    made += results
    if results and len(texts) == len(parts):
        results[-1]["content"] = "\n\n".join(filter(None, (results[-1]["content"], *texts)))
    elif made and made[-1]["role"] == "user":
        made[-1]["content"] += parts
    else:
        made.append({"role": "user", "content": parts})


def _answered(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    """What the assistant said, thought and called."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        if block.type == "tool_use":
            function = {"name": block.name or "", "arguments": block.input or {}}
            calls.append({"id": (block.id or "").removeprefix(TOOL_ID), "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":  # which nobody else can read
            texts.append(block.said(f"{where}.content[{number}]"))
    made: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    made |= {"tool_calls": calls} if calls else {}
    return made | ({"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {})


def _chosen(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _CHOICES.get(str(kind), choice) if choice else None


def _thinking(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type")
    return {**given, "type": _THINKING.get(str(kind), kind)}


def _format(given: Any) -> Any:
    """A schema, as chats have it."""
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return given
    schema = {"name": "answer", "schema": given.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _read(request: MessagesRequest) -> tuple[Chat, list[Plain]]:
    chat = request.chat()
    chat.require_here()
    return chat, plain_messages(chat.messages)


async def counted(model: ServedModel, request: MessagesRequest) -> int:
    """How many tokens a request reads. Raises Refusal or KvliteError if it cannot be read."""
    prompt = await prompt_of(model, *await asyncio.to_thread(_read, request))
    return len(prompt.ids)


class MessagesAnswer:
    """The answer to one request, whole or event by event."""

    def __init__(
        self,
        model: ServedModel,
        request: MessagesRequest,
        ask: Ask,
        new_reader: Callable[[], AnswerReader] | None,
    ) -> None:
        self.model, self.request, self.ask = model, request, ask
        self._new_reader, self._blocks = new_reader, Blocks()
        self._usage = Usage(model.names[0], len(ask.ids))
        self._ids, self._reason = list[int](), "stop"
        self._id = f"msg_{uuid4().hex}"

    @classmethod
    async def of(cls, model: ServedModel, request: MessagesRequest) -> "MessagesAnswer":
        """For a request; raises Refusal or KvliteError if it cannot be answered."""
        chat, messages = await asyncio.to_thread(_read, request)
        return cls(model, request, *await asked(model, chat, messages, None))

    async def whole(self) -> dict[str, Any]:
        """The message."""
        async with aclosing(self.stream()) as events:
            async for _ in events:
                pass
        return {**self._message, **self._stopped, "usage": self._counted}

    async def stream(self) -> AsyncGenerator[Event | str]:
        """Events; while nothing comes, pings, and now and then an event that says nothing."""
        beats = 0
        async with aclosing(
            heard_of(self.model, self.ask, self._usage, self._new_reader)
        ) as tokens:
            async for heard in tokens:
                if (piece := heard.token.piece) is None:
                    yield heard.token.waiting
                if not beats:
                    message = {**self._message, "content": [], "usage": self._counted}
                    yield {"type": "message_start", "message": message}
                beats += 1
                if piece is None:
                    yield PING if beats % EVENT_BEATS else STILL
                    continue
                self._ids += [] if piece.token_id is None else [piece.token_id]
                self._reason = heard.reason or self._reason
                for event in self._blocks.push(heard.parts):
                    yield event
        for event in self._blocks.flush():
            yield event
        yield {"type": "message_delta", "delta": self._stopped, "usage": self._counted}
        yield {"type": "message_stop"}

    @property
    def _message(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant"}
        about = {"model": self.model.names[0], "content": self._blocks.content}
        return {**head, **about, "stop_reason": None, "stop_sequence": None}

    @property
    def _counted(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt - usage.known,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.known,
            "output_tokens": usage.generated,
            **({"kvlite": {"notes": usage.notes}} if usage.notes else {}),
        }

    @property
    def _stopped(self) -> dict[str, str | None]:
        """Why it ended, in Anthropic's words."""
        runner, found = self.model.ready(), None
        if self._reason == "length":
            full = len(self.ask.ids) + len(self._ids) >= runner.shape.max_context
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif self._blocks.calls:
            reason = "tool_use"
        else:
            ended = not self._ids or self._ids[-1] in runner.model.stop_ids
            found = None if ended else self._met(runner.tokenizer)
            reason = "stop_sequence" if found else "end_turn"
        return {"stop_reason": reason, "stop_sequence": found}

    def _met(self, tokenizer: Any) -> str | None:
        """The stop string that came first."""
        text = tokenizer.decode(self._ids, skip_special_tokens=True)
        met = [(text.find(each), each) for each in self.request.stop_sequences or () if each]
        return min(((at, each) for at, each in met if at >= 0), default=(0, None))[1]
