"""What a response is asked with: items, as messages for the chat template."""

import base64
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import model_validator

from kvlite.server.messages import (
    Called,
    Content,
    Fields,
    Message,
    Plain,
    Role,
    TextPart,
    ToolCall,
    joined,
    result_text,
)
from kvlite.server.refusals import Refusal

_LOG = logging.getLogger("kvlite.server")
FUNCTION, CUSTOM = "function_call", "custom_tool_call"
"""Types of items that are calls: of a function, and of a tool whose input is any text."""
_RESULTS = (f"{FUNCTION}_output", f"{CUSTOM}_output")
_KNOWN = ("message", "reasoning", FUNCTION, CUSTOM, *_RESULTS)
# The longest name of a tool that a template is told, and how many types are named in a log line.
LONGEST_NAME, _NAMED = 128, 8


@dataclass(frozen=True)
class ToolName:
    """What a client calls a tool.

    Attributes:
        kind: the type of items that are calls of it.
        namespace: the group that it is in; "" for none.
    """

    kind: str
    name: str
    namespace: str = ""

    @property
    def flat(self) -> str:
        """A name that has its group, for templates, which know no groups."""
        group = re.sub(r"[^\w-]", "_", self.namespace)[: max(1, LONGEST_NAME - 2 - len(self.name))]
        return f"{group}__{self.name}"[:LONGEST_NAME] if group else self.name


def group_of(namespace: str | None) -> str:
    """The group that a client means; that of all functions is none."""
    return "" if namespace in (None, "functions") else namespace


Shown = Callable[[ToolName], str]
"""The name by which the template is told of a tool."""


class Item(Fields):
    """A message, a call or what it came to, as responses have them."""

    type: str | None = None
    role: Role | None = None
    content: Content = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: Content = None
    summary: list[TextPart] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_known_type(cls, plain: Any) -> Any:
        """Of an item of another type its type alone is read: fields may be of any other kind."""
        kind = plain.get("type") if isinstance(plain, Mapping) else None
        return {"type": kind} if isinstance(kind, str) and kind not in _KNOWN else plain

    @property
    def is_known(self) -> bool:
        """Whether it is something that a model here can be told."""
        return (self.type or "message") in _KNOWN

    def plain(self, number: int, shown: Shown = lambda tool: tool.flat) -> Plain:
        """As of a message, for an item that is known; raises Refusal for one that has no role, or
        more than text."""
        if self.type in (FUNCTION, CUSTOM):
            tool = ToolName(self.type, self.name or "", group_of(self.namespace))
            given = self.arguments if self.type == FUNCTION else {"input": self.input or ""}
            called = Called(name=shown(tool), arguments=given)
            call = ToolCall(id=self.call_id, function=called)
            return {"role": "assistant", "content": "", "tool_calls": [call.plain()]}
        if self.type == "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": self._thought}
        if self.type in _RESULTS:
            text = result_text(self.output, f"input[{number}]", "input")
            return {"role": "tool", "content": text, "tool_call_id": self.call_id or "", "name": ""}
        if self.role is None:
            raise Refusal(f"input[{number}] has no role: send messages and calls", param="input")
        return Message(role=self.role, content=self.content).plain(number, "input")

    @property
    def _thought(self) -> str:
        """The text of an item of reasoning; "" if it is another program's secret."""
        parts = self.content if isinstance(self.content, list) else []
        texts = [each.text for each in parts or self.summary or () if each.text]
        if not texts and self.encrypted_content:
            with suppress(ValueError):
                texts = [base64.b64decode(self.encrypted_content, validate=True).decode()]
        return "\n".join(texts)


def item_messages(items: Sequence[Item], shown: Shown) -> list[Plain]:
    """For the chat template; items of types that say nothing to a model here are left out, with a
    log line. Raises Refusal if nothing is left, or an item has more than text."""
    strange = Counter(str(each.type)[:40] for each in items if not each.is_known)
    if strange:
        told = ", ".join(f"{count} of type {kind!r}" for kind, count in strange.most_common(_NAMED))
        _LOG.info("items of the input are left out (%d): %s", strange.total(), told)
    made = [each.plain(number, shown) for number, each in enumerate(items) if each.is_known]
    if not made:
        raise Refusal("input has no message, call or result: say something", param="input")
    return joined(made)
