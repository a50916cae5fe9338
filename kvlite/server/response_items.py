"""What a response is made of: reasoning, a message, calls; as a whole, and while it comes."""

import base64
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any
from uuid import uuid4

from kvlite.model.answers.reader import Part
from kvlite.server.custom_input import CustomInput
from kvlite.server.response_input import CUSTOM, FUNCTION, ToolName
from kvlite.server.tools import call_id

Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]
Named = Callable[[str], ToolName]
"""What the client calls a tool that the model called."""
_KINDS = {"text": "message", "reasoning": "reasoning"}
# Of each kind of call: what it is called with, the events of that, and how ids begin.
_CALLS = {
    FUNCTION: ("arguments", "function_call_arguments", "fc"),
    CUSTOM: ("input", "custom_tool_call_input", "ctc"),
}


def items_of(
    parts: Sequence[Part], named: Named, logprobs: Sequence[Item] = (), *, is_cut: bool = False
) -> list[Item]:
    """The items of a whole answer, which are those of its stream; `logprobs` as of `push`, `is_cut`
    as of `flush`."""
    stream = ItemStream(named)
    for _ in chain(stream.push(parts), stream.flush(is_cut=is_cut)):
        pass
    for item in stream.items if logprobs else ():
        if item["type"] == "message":
            item["content"][0]["logprobs"] = [*logprobs]
    return stream.items


class ItemStream:
    """Events of an answer that comes.

    Attributes:
        items: those that are whole.
    """

    def __init__(self, named: Named) -> None:
        self.items = list[Item]()
        self._named, self._input = named, CustomInput()
        self._open: Item | None = None
        self._said, self._new = "", list[Item]()
        self._logprobs = list[Item]()

    def push(self, parts: Sequence[Part], logprobs: Sequence[Item] = ()) -> Iterator[Event]:
        """More of it; `logprobs` are of its tokens, as chat completions have them."""
        self._new += logprobs
        for part in parts:
            kind = _KINDS.get(part.kind)
            if part.kind == "name" or (kind and (self._open or {}).get("type") != kind):
                yield from self.close()
                yield from self._begin(part)
            if part.kind != "name":
                yield from self._more(part.text)

    def flush(self, *, is_cut: bool = False) -> Iterator[Event]:
        """The end of it, which is incomplete if it is cut; an empty message if nothing came."""
        status = "incomplete" if is_cut else "completed"
        yield from self.close(status)
        if all(each["type"] == "reasoning" for each in self.items):
            yield from self._begin(Part("text", ""))
            yield from self.close(status)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The end of the item that is open, if one is."""
        if (item := self._open) is None:
            return
        if item["type"] == CUSTOM:
            yield from self._called_with(self._input.flush())
        self._open, said = None, self._said
        place = self._place(item)
        if item["type"] in _CALLS:
            field, event, _ = _CALLS[item["type"]]
            item = {**item, field: said}
            name = {"name": item["name"]} if item["type"] == FUNCTION else {}
            yield f"{event}.done", {**place, **name, field: said}
        elif item["type"] == "reasoning":
            item = {**_reasoning_item(said), "id": item["id"]}
            yield "reasoning_text.done", {**place, "content_index": 0, "text": said}
        else:
            self._logprobs += self._new
            part, place = _text_part(said, self._logprobs), {**place, "content_index": 0}
            item = {**_message([part]), "id": item["id"]}
            yield "output_text.done", {**place, "text": said, "logprobs": _told(self._logprobs)}
            yield "content_part.done", {**place, "part": part}
        item["status"] = status
        yield "output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)

    def _begin(self, part: Part) -> Iterator[Event]:
        if part.kind == "name":
            item, self._input = _call_item(self._named(part.text)), CustomInput()
        elif part.kind == "reasoning":
            item = {**_reasoning_item(""), "content": []}
        else:
            item = _message([])
        self._open, self._said = {**item, "status": "in_progress"}, ""
        yield "output_item.added", {"output_index": len(self.items), "item": self._open}
        if part.kind == "text":
            place = {**self._place(self._open), "content_index": 0}
            yield "content_part.added", {**place, "part": _text_part("")}

    def _more(self, text: str) -> Iterator[Event]:
        if self._open is None:
            return
        place, kind = self._place(self._open), self._open["type"]
        if kind in _CALLS:
            yield from self._called_with(self._input.push(text) if kind == CUSTOM else text)
            return
        self._said += text
        if kind == "reasoning":
            yield "reasoning_text.delta", {**place, "content_index": 0, "delta": text}
        else:
            place, new = {**place, "content_index": 0}, self._new
            self._logprobs, self._new = [*self._logprobs, *new], []
            yield "output_text.delta", {**place, "delta": text, "logprobs": _told(new)}

    def _called_with(self, text: str) -> Iterator[Event]:
        """More of what a call is made with, if it is any."""
        if self._open is not None and text:
            self._said += text
            event = f"{_CALLS[self._open['type']][1]}.delta"
            yield event, {**self._place(self._open), "delta": text}

    def _place(self, item: Item) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items)}


def _message(content: list[dict[str, Any]]) -> Item:
    kind = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
    return {**kind, "status": "completed", "content": content}


def _reasoning_item(text: str) -> Item:
    """Clients send either the text or what is called encrypted back."""
    return {
        "id": f"rs_{uuid4().hex}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": base64.b64encode(text.encode("utf-8", "replace")).decode(),
    }


def _call_item(tool: ToolName) -> Item:
    """Clients do not know a tool that is in a group without it, nor any other with one."""
    field, _, begin = _CALLS[tool.kind]
    group, call = {"namespace": tool.namespace} if tool.namespace else {}, call_id()
    kind = {"id": f"{begin}_{call}", "type": tool.kind, "status": "completed"}
    return {**kind, "call_id": call, **group, "name": tool.name, field: ""}


def _text_part(text: str, logprobs: Sequence[Item] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def _told(logprobs: Sequence[Item]) -> list[Item]:
    """Logprobs as events have them: without bytes."""
    return [
        {
            "token": each["token"],
            "logprob": each["logprob"],
            "top_logprobs": [
                {"token": best["token"], "logprob": best["logprob"]}
                for best in each["top_logprobs"]
            ],
        }
        for each in logprobs
    ]
