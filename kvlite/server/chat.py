"""`/v1/chat/completions`."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from uuid import uuid4

from kvlite import __version__
from kvlite.conversation.prefix import common, cuts_anywhere
from kvlite.conversation.record import StoredMessage
from kvlite.model.answers.reader import AnswerReader, Part, calls_in, text_in
from kvlite.model.answers.thinking import opens_reasoning
from kvlite.server.chances import Chances, chat_logprobs
from kvlite.server.fields import Chat, ResponseRequest
from kvlite.server.files import with_documents
from kvlite.server.messages import Plain, plain_messages
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import Ask, ServedModel
from kvlite.server.stable_prefix import Stable, is_allowed, stable
from kvlite.server.tools import ToolUse, tool_use
from kvlite.server.usage import Call, Choice, Usage, gathered, heard_of, message_ids

_LOG = logging.getLogger("kvlite.server")
_TOP, _FINGERPRINT = 20, f"kvlite-{__version__}"
_ANOTHER = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class Prompt:
    """What a model reads of a request.

    Attributes:
        told: the messages as the model is told them.
        lent: as of `Ask`.
    """

    ids: list[int]
    use: ToolUse
    told: Sequence[Plain]
    lent: Sequence[Path]
    stable: Stable


async def prompt_of(
    model: ServedModel, request: Chat | ResponseRequest, messages: Sequence[Plain]
) -> Prompt:
    """What a model reads of a request. Raises Refusal or KvliteError if it cannot be read.

    Args:
        messages: with the ids of documents, whose text is put into them.
    """
    runner, state = model.ready(), model.state
    known = model.told_times if is_allowed(request, state.config) else ()

    def made() -> tuple[ToolUse, Stable, Sequence[Plain], Sequence[Path]]:
        several = request.parallel_tool_calls is not False
        use = tool_use(runner.model, request.tools, request.tool_choice, several=several)
        kept = stable(messages, known)
        return use, kept, *with_documents(kept.messages, request.documents, state.files)

    use, kept, told, lent = await asyncio.to_thread(made)
    variables = request.variables(runner.settings)
    ids = await message_ids(model, told, use.shown, variables, continues=request.continues)
    return Prompt(ids, use, told, lent, kept)


async def asked(
    model: ServedModel,
    request: Chat | ResponseRequest,
    messages: Sequence[Plain],
    top: int | None,
) -> tuple[Ask, Callable[[], AnswerReader] | None]:
    """What is asked of a model, and what reads an answer. Raises Refusal or KvliteError if it
    cannot be answered. Args are those of `prompt_of`, and `top` as of `Ask`."""
    runner = model.ready()
    settings = await model.state.waited_for(partial(request.settings, runner.settings))
    prompt = await prompt_of(model, request, messages)
    ids, use, told = prompt.ids, prompt.use, prompt.told
    if changed := prompt.stable.kept:
        _LOG.info("stable_prefix: %d dates and times are told as earlier", len(changed))
    form, most = runner.model.answer_form, request.most_reasoning
    opened, goes_on = opens_reasoning(form, runner.tokenizer, ids), request.continues
    if request.continues and form.reasoning is not None:
        begun, begin = told[-1]["content"], form.reasoning.begin
        is_within = begun.rfind(begin) > begun.rfind(form.reasoning.end)
        opened = opened or is_within
        goes_on = not opened or (is_within and not begun.rstrip().endswith(begin))
    if use.tools:
        most = runner.settings.reasoning_budget if most is None else most
        grammar = partial(use.grammar, runner.model, settings.get("schema", ""), most)
        settings["schema"] = await model.state.waited_for(partial(grammar, opened=opened))
    elif most is not None:
        settings["reasoning_budget"] = most
    empty = request.longest == 0
    said = [
        StoredMessage(each["role"], each["content"])
        for each in messages
        if each["role"] in ("user", "assistant") and each.get("content")
    ]
    parting = 0
    if not cuts_anywhere(runner.model) and all(each["role"] != "assistant" for each in told):
        # A subagent has the same instructions and tools, and another task.
        task = [*takewhile(lambda each: each["role"] == "system", told), _ANOTHER]
        variables = request.variables(runner.settings)
        parting = common(ids, await message_ids(model, task, use.shown, variables))
    more: dict[str, Any] = {"times": prompt.stable.times, "notes": prompt.stable.notes}
    more |= {"lent": prompt.lent, "said": said, "parting": parting}
    ask = Ask(ids, settings, request.choices, top, empty=empty, **more)
    if not use.tools and form.reasoning is None:
        return ask, None
    return ask, partial(
        AnswerReader, form, use.tools, reasoning=opened, begun=goes_on, several=use.several
    )


class ChatAnswer:
    """The answer to one request, whole or piece by piece."""

    def __init__(
        self,
        model: ServedModel,
        request: Chat,
        ask: Ask,
        new_reader: Callable[[], AnswerReader] | None = None,
    ) -> None:
        self.model, self.request, self.ask = model, request, ask
        self._new_reader = new_reader
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time())}
        self._tokenizer = model.ready().tokenizer

    @classmethod
    async def of(cls, model: ServedModel, request: Chat) -> "ChatAnswer":
        """For a request; raises Refusal or KvliteError if it cannot be answered."""
        request.require_here()
        messages = await asyncio.to_thread(plain_messages, request.messages)
        top = top_of(request.logprobs, request.top_logprobs, "logprobs: true")
        return cls(model, request, *await asked(model, request, messages, top))

    async def whole(self) -> dict[str, Any]:
        """The completion object."""
        choices, usage = await gathered(self.model, self.ask, self._new_reader)
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
        answer = heard_of(self.model, self.ask, usage, self._new_reader)
        async with aclosing(answer) as tokens:
            async for heard in tokens:
                if heard.token.piece is None:
                    yield heard.token.waiting
                    continue
                index, found = heard.token.choice, self._logprobs(heard.chances)
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(index, {"role": "assistant", "content": ""})
                if found is not None and not heard.text:
                    yield self._chunk(index, {"content": ""}, logprobs=found)
                for part in heard.parts:
                    made[index] += part.kind == "name"
                    chances = found if part.kind == "text" else None
                    yield self._chunk(index, _delta(part, made[index] - 1), logprobs=chances)
                    found = None if part.kind == "text" else found
                if heard.reason is not None:
                    yield self._chunk(index, {}, _reason(heard.reason, made[index]))
        if self.request.with_usage:
            yield self._chunks([], usage.plain())

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = None
        if self.ask.top is not None:
            content = chat_logprobs(self._tokenizer, choice.chances)
            found = {"content": content, "refusal": None}
        text, calls = choice.text, [Call(*each) for each in calls_in(choice.parts)]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning := text_in(choice.parts, "reasoning"):
            message["reasoning_content"] = reasoning
        message |= {"refusal": None, "annotations": []}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(each) for each in calls]}
        reason = _reason(choice.reason, len(calls))
        return {"index": index, "message": message, "logprobs": found, "finish_reason": reason}

    def _logprobs(self, found: Sequence[Chances]) -> dict[str, Any] | None:
        if not found:
            return None
        return {"content": chat_logprobs(self._tokenizer, found), "refusal": None}

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


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _delta(part: Part, call: int) -> dict[str, Any]:
    """What a stream has of a part; a part of a call, of the one with this number."""
    if part.kind == "text":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    if part.kind == "name":
        return {"tool_calls": [{"index": call, **_call(Call(part.text))}]}
    return {"tool_calls": [{"index": call, "function": {"arguments": part.text}}]}


def _reason(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason


def top_of(wanted: bool | None, top: int | None, needs: str) -> int | None:
    """How many likeliest tokens are wanted; None for no log probabilities. Raises Refusal if they
    are too many, or wanted without what that `needs`."""
    if not wanted:
        if top:
            raise Refusal(f"top_logprobs needs {needs}", param="top_logprobs")
        return None
    if not 0 <= (top or 0) <= _TOP:
        raise Refusal(f"top_logprobs {top} is not between 0 and {_TOP}", param="top_logprobs")
    return top or 0
