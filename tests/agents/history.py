"""What an agent sends: twenty tools and its whole history with every request, and what it was
answered; figures of each request."""

import json
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

# A text of some hundred tokens, which no two places of a history have alike.
_LINES = "    value_{0} = table[{0}] + offset({0}, scale={1})\n    check(value_{0}, {1})\n"


def tool(number: int) -> dict[str, Any]:
    """One of many tools, as agents describe them."""
    path = {"type": "string", "description": f"Which file tool {number} works on, by its path."}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    said = f"Tool {number}: works on a file of the project. Give its path from the root. " * 3
    function = {"name": f"tool_{number}", "description": said, "parameters": parameters}
    return {"type": "function", "function": function}


def listing(number: int, lines: int) -> str:
    """A file's text, some 25 tokens a line."""
    return "".join(_LINES.format(number * 1000 + at, at % 7) for at in range(lines))


@dataclass
class Figures:
    """What a request came to.

    Attributes:
        tokens, read: of its prompt, and those of them that were read for it.
        first_s: seconds to the first token.
        gaps_s: seconds between tokens.
        answer: as a message.
    """

    tokens: int
    read: int
    first_s: float
    gaps_s: list[float] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)


@dataclass
class Agent:
    """An agent at a server, and its history so far."""

    address: str
    model: str
    system: str = "You are an agent that works on files. "
    tools: Sequence[dict[str, Any]] = tuple(map(tool, range(20)))
    answer_tokens: int = 24
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = self.messages or [{"role": "system", "content": self.system}]

    def branch(self, count: int) -> "Agent":
        """An agent with the same tools, and the first messages of this one."""
        first = deepcopy(self.messages[:count])
        own = self.system, self.tools, self.answer_tokens
        return Agent(self.address, self.model, *own, first)

    def result(self, number: int, lines: int) -> None:
        """A call was made and has a result, which the next request has."""
        call = {"name": "tool_3", "arguments": json.dumps({"path": f"src/{number}.py"})}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        told = {"role": "tool", "tool_call_id": f"call_{number}", "content": listing(number, lines)}
        self.messages += [{"role": "assistant", "content": "", "tool_calls": calls}, told]

    def say(self, text: str) -> Figures:
        """Ask the server, with the whole history, and remember what it answers."""
        self.messages.append({"role": "user", "content": text})
        figures = ask(self.address, self.model, self.messages, self.tools, self.answer_tokens)
        self.messages.append(figures.answer)
        return figures


def ask(
    address: str,
    model: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    most: int = 24,
) -> Figures:
    """A streamed request, as agents send it."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": most,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"tools": list(tools)} if tools else {}),
    }
    began, came, usage = time.monotonic(), list[float](), dict[str, Any]()
    text, calls = "", list[dict[str, Any]]()
    url, wait = f"{address}/v1/chat/completions", httpx.Timeout(600)
    with httpx.stream("POST", url, json=body, timeout=wait) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                delta = choice["delta"]
                if delta.get("content") or delta.get("tool_calls"):
                    came.append(time.monotonic())
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call.get("id"):
                        calls.append(call)
                    else:
                        calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    known = usage["prompt_tokens_details"]["cached_tokens"]
    first = (came[0] if came else time.monotonic()) - began
    gaps = [later - earlier for earlier, later in pairwise(came)]
    answer = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    return Figures(usage["prompt_tokens"], usage["prompt_tokens"] - known, first, gaps, answer)
