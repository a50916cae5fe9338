"""Messages in the form that chat templates expect, and what is tried where one refuses them."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from kvlite.model.input_marks import object_in

Message = dict[str, Any]
Messages = list[Message]
Step = Callable[[Messages], Messages]

# Between texts of messages that become one.
BETWEEN = "\n\n"
_THOUGHT = re.compile(r"\s*<think>\n?(.*?)</think>\s*", re.DOTALL)
_ID = re.compile("[a-zA-Z0-9]{9}")
# The most changes that are tried together.
_MOST = 4


def normalized(messages: Sequence[Mapping[str, Any]], source: str) -> Messages:
    """Copies in which content is text, arguments are objects, and nothing is null. What an answer
    thought is taken out of its text if the template, `source`, would look for it there."""
    made = list[Message]()
    for each in messages:
        message = _without_null({**each, "content": text_of(each.get("content"))})
        if calls := message.pop("tool_calls", None):
            message["tool_calls"] = [_call(call) for call in calls]
        if message["role"] == "assistant":
            _separate_thought(message, source)
        made.append(message)
    return made


def normalized_tools(tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Tools with a description and parameters, which some templates cannot do without."""
    made = list[Message]()
    for tool in tools:
        function = _without_null(tool.get("function", tool))
        parameters = {"type": "object", "properties": {}} | (function.get("parameters") or {})
        function = {"name": "", "description": ""} | function | {"parameters": parameters}
        made.append({"type": "function", "function": function})
    return made


def described(tools: Sequence[Message]) -> list[Message]:
    """Tools whose parameters all have a description."""
    made = list[Message]()
    for tool in tools:
        function = tool["function"]
        properties = {
            name: {"description": "", **each} if isinstance(each, dict) else each
            for name, each in function["parameters"]["properties"].items()
        }
        parameters = {**function["parameters"], "properties": properties}
        made.append({**tool, "function": {**function, "parameters": parameters}})
    return made


def text_of(content: Any) -> str:
    """The text of a message's content, which may come in parts; no content is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = (each if isinstance(each, str) else each.get("text") for each in content)
    return "\n".join(each for each in parts if each)


def ways(messages: Messages) -> Iterator[tuple[Messages, Sequence[str]]]:
    """Forms of a conversation that a template may take where it refuses this one, and what was
    changed; the least changed first."""
    steps = {name: step for name, step in _STEPS.items() if step(messages) != messages}
    for count in range(1, min(len(steps), _MOST) + 1):
        for names in combinations(steps, count):
            made = messages
            for name in names:
                made = steps[name](made)
            yield made, names


def _without_null(value: Mapping[str, Any]) -> Message:
    return {key: each for key, each in value.items() if each is not None}


def _call(call: Mapping[str, Any]) -> Message:
    function = _without_null(call.get("function", call))
    arguments = function.get("arguments") or {}
    if (parsed := object_in(arguments)) is not None:
        arguments = parsed
    plain = _without_null({**call, "type": "function"})
    return {**plain, "function": {**function, "arguments": arguments}}


def _separate_thought(message: Message, source: str) -> None:
    """Reasoning under its own names: transformers' and gpt-oss's, which takes no text beside it
    where there are calls."""
    names = ("reasoning_content", "reasoning", "thinking")
    thought = next((message[name] for name in names if message.get(name)), "")
    for name in names:
        message.pop(name, None)
    found = _THOUGHT.match(message["content"]) if "</think>" in source else None
    if found and not thought:
        thought, message["content"] = found[1].rstrip("\n"), message["content"][found.end() :]
    if thought:
        message["reasoning_content"] = thought
        if not (message["content"] and message.get("tool_calls")):
            message["thinking"] = thought


def _with_calls(messages: Messages, change: Callable[[Message, str], Message]) -> Messages:
    return [
        {**each, "tool_calls": [change(call, f"{number} {at}") for at, call in enumerate(calls)]}
        if (calls := each.get("tool_calls"))
        else each
        for number, each in enumerate(messages)
    ]


def _short_ids(messages: Messages) -> Messages:
    def short(name: Any) -> str:
        text = str(name)
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        return text if _ID.fullmatch(text) else digest[:9]

    def named(call: Message, place: str) -> Message:
        return {**call, "id": short(call.get("id") or place)}

    return [
        {**each, "tool_call_id": short(each.get("tool_call_id", ""))}
        if each["role"] == "tool"
        else each
        for each in _with_calls(messages, named)
    ]


def text_arguments(messages: Messages) -> Messages:
    """Arguments as text."""

    def written(call: Message, place: str) -> Message:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return _with_calls(messages, written)


def _alternating(messages: Messages) -> Messages:
    """Messages of one role as one; what the user says after a result as a part of it; and an
    answer only after a question."""
    made = list[Message]()
    for each in messages:
        before = made[-1] if made else None
        if before is None or before["role"] == "system":
            if each["role"] == "assistant":
                made.append({"role": "user", "content": ""})
        elif each["role"] == before["role"] == "assistant":
            calls = [*before.get("tool_calls", ()), *each.get("tool_calls", ())]
            both = {**before, **each, "content": _joined(before, each)}
            made[-1] = {**both, "tool_calls": calls} if calls else both
            continue
        elif each["role"] == "user" and before["role"] in ("user", "tool"):
            made[-1] = {**before, "content": _joined(before, each)}
            continue
        made.append(each)
    return made


def _one_call_each(messages: Messages) -> Messages:
    made, rest = list[Message](), [*messages]
    while rest:
        each = rest.pop(0)
        calls = each.get("tool_calls", ())
        if len(calls) < 2:
            made.append(each)
            continue
        count = next((at for at, one in enumerate(rest) if one["role"] != "tool"), len(rest))
        results, rest = rest[:count], rest[count:]
        for number, call in enumerate(calls):
            one = {**each, "tool_calls": [call]}
            made.append({**one, "content": ""} if number else one)
            own = next((result for result in results if _answers(result, [call])), None)
            if own is None:  # one that names none of them
                own = next((result for result in results if not _answers(result, calls)), None)
            if own is not None:
                results.remove(own)
                made.append(own)
        made += results
    return made


def _calls_apart(messages: Messages) -> Messages:
    made = list[Message]()
    for each in messages:
        if each["content"] and each.get("tool_calls"):
            made.append({"role": each["role"], "content": each["content"]})
            each = {**each, "content": ""}
        made.append(each)
    return made


def _answers(result: Message, calls: Sequence[Message]) -> bool:
    name = result.get("tool_call_id")
    return bool(name) and any(name == call.get("id") for call in calls)


def _from_user(message: Message) -> Message:
    return {"role": "user", "content": message["content"]} if message["role"] == "tool" else message


def _results_after_calls(messages: Messages) -> Messages:
    made, called = list[Message](), False
    for each in messages:
        called = bool(each.get("tool_calls")) or (called and each["role"] == "tool")
        made.append(each if called else _from_user(each))
    return made


def _calls_as_text(messages: Messages) -> Messages:
    made = list[Message]()
    for each in messages:
        lines = [
            json.dumps({name: call["function"].get(name) for name in ("name", "arguments")})
            for call in each.get("tool_calls", ())
        ]
        text = BETWEEN.join(filter(None, [each["content"], "\n".join(lines)]))
        rest = {name: value for name, value in each.items() if name != "tool_calls"}
        made.append({**rest, "content": text})
    return made


def _first_systems(messages: Messages) -> int:
    return next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))


def _one_system(messages: Messages) -> Messages:
    count = _first_systems(messages)
    texts = [each["content"] for each in messages[:count] if each["content"]]
    made = [{**messages[0], "content": BETWEEN.join(texts)}] if count else []
    for each in messages[count:]:
        before = made[-1] if made else {"role": ""}
        if each["role"] == "system" and before["role"] in ("user", "tool"):
            made[-1] = {**before, "content": _joined(before, each)}
        else:
            made.append({**each, "role": "user"} if each["role"] == "system" else each)
    return made


def _no_system(messages: Messages) -> Messages:
    count = _first_systems(messages)
    told = BETWEEN.join(each["content"] for each in messages[:count])
    rest = messages[count:]
    if count and rest[:1] and rest[0]["role"] == "user":
        text = f"{told}{BETWEEN}{rest[0]['content']}" if told else rest[0]["content"]
        return [{**rest[0], "content": text}, *rest[1:]]
    return [{"role": "user", "content": told}, *rest] if told else rest


def _joined(one: Message, other: Message) -> str:
    return BETWEEN.join(each["content"] for each in (one, other) if each["content"])


# In the words of a log line: "the chat template takes it with ...".
_STEPS: dict[str, Step] = {
    "ids of nine characters": _short_ids,
    "arguments as text": text_arguments,
    "roles in turns": _alternating,
    "one call a message": _one_call_each,
    "calls apart from text": _calls_apart,
    "results without a call from the user": _results_after_calls,
    "calls as text": _calls_as_text,
    "results from the user": lambda messages: [*map(_from_user, messages)],
    "one system message": _one_system,
    "the system message in the user's": _no_system,
}
