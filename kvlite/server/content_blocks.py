"""What an Anthropic message is made of: text, reasoning, calls; one block after the other."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvlite.config.checked_file import Damaged, from_json
from kvlite.model.answers.reader import Part
from kvlite.server.usage import Call

TOOL_ID = "toolu_"
# Claude Code drops reasoning without a signature. Nothing is signed here.
_SIGNATURE = "kvlite"
_STARTS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
# Of each kind of part: the delta, its field, and the block's.
_DELTAS = {
    "text": ("text_delta", "text", "text"),
    "reasoning": ("thinking_delta", "thinking", "thinking"),
    "arguments": ("input_json_delta", "partial_json", "input"),
}

Event = dict[str, Any]

PING: Event = {"type": "ping"}
# It says nothing new. Claude Code hangs up after five minutes in which nothing but pings came, and
# one such event in so many beats of five seconds is enough: others count each as a change.
STILL: Event = {
    "type": "message_delta",
    "delta": {"stop_reason": None, "stop_sequence": None},
    "usage": {"output_tokens": 0},
}
EVENT_BEATS = 24


class Blocks:
    """The content of an answer that comes, one block after the other.

    Attributes:
        content: blocks, the last of which may be open.
        calls: how many of them are calls.
    """

    def __init__(self) -> None:
        self.content = list[dict[str, Any]]()
        self.calls = 0
        self._kind, self._said = "", ""

    def push(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Events of what came."""
        for part in parts:
            kind = "arguments" if part.kind == "name" else part.kind
            if part.kind == "name" or kind != self._kind:
                yield from self._close()
                yield self._open(kind, part)
            if part.kind != "name":
                self._said += part.text
                name, field, _ = _DELTAS[kind]
                yield self._delta({"type": name, field: part.text})

    def flush(self) -> Iterator[Event]:
        """The end of it; an empty text if nothing came."""
        if not self.content:
            yield self._open("text", Part("text", ""))
        yield from self._close()

    def _open(self, kind: str, part: Part) -> Event:
        self._kind, self._said = kind, ""
        block = dict(_STARTS.get(kind, {}))
        if not block:
            self.calls += 1
            own = f"{TOOL_ID}{Call(part.text).id}"
            block = {"type": "tool_use", "id": own, "name": part.text, "input": {}}
        self.content.append(block)
        return {
            "type": "content_block_start",
            "index": len(self.content) - 1,
            "content_block": {**block},
        }

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if not self._kind:
            return
        kind, block, self._kind = self._kind, self.content[-1], ""
        if kind == "reasoning":
            block["signature"] = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        block[_DELTAS[kind][2]] = _input(self._said) if kind == "arguments" else self._said
        yield {"type": "content_block_stop", "index": len(self.content) - 1}


def _input(said: str) -> Any:
    """The arguments of a call; none where the answer was cut in their midst."""
    try:
        return from_json(said)
    except Damaged:
        return {}
