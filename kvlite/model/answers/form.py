"""The form of answers: what stands around reasoning, and around and within calls of tools."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvlite.model.answers.rules import Rules

# Stands for the number of a call in an answer, counted from 0, and for nine letters and digits.
INDEX, ID = "\ue000", "\ue001"
# A tag, a word in brackets, or a word before one of these signs; with what names a kind of call.
_TRIGGER = re.compile(r"<[^<>\s]+>(\w+ to=\w+\.)?|\[[A-Z_]+\]|<\w+=|\w+[\[:]")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON Schema of its arguments.
        strict: whether all of that schema must be followed; else what cannot be is left out.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def plain(self) -> dict[str, Any]:
        """As chat templates are told it."""
        said = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**said, "parameters": {**self.parameters}}}


class ArgumentReader(Protocol):
    """Reads the arguments of one call as they come."""

    def push(self, text: str) -> tuple[str, str | None]:
        """More of the answer.

        Returns:
            The JSON that is certain now; and, once the arguments have ended, the text after them.
        """
        ...

    def flush(self) -> str:
        """What is left of the JSON, where the answer was cut."""
        ...


class Arguments(Protocol):
    """How the arguments of a call are written."""

    @property
    def opening(self) -> str:
        """What they always begin with."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """What stands around names and values."""
        ...

    def rule(self, tool: Tool, rules: "Rules", *, enforced: bool) -> str:
        """A rule, in Lark, of a tool's arguments; `enforced` if they must follow its schema."""
        ...

    def reader(self, parameters: Mapping[str, Any], after: Sequence[str]) -> ArgumentReader:
        """A reader of arguments with this schema; `after` is what may follow them."""
        ...


@dataclass(frozen=True)
class CallForm:
    """How calls are written: `first`, then name, `middle` and arguments of each with `between` two
    of them, then `last`.

    Attributes:
        several: whether an answer may have several calls.
    """

    first: str
    middle: str
    between: str
    last: str
    arguments: Arguments
    several: bool = True

    @property
    def trigger(self) -> str:
        """What tells a call from text; "" if nothing does, so that only an answer that begins with
        a call is one."""
        begin = self.first.strip()
        found = _TRIGGER.match(begin)
        return found[0] if found else ""


@dataclass(frozen=True)
class ReasoningForm:
    """What stands before and after reasoning, without white space around it."""

    begin: str
    end: str


@dataclass(frozen=True)
class AnswerForm:
    """How a model writes answers.

    Attributes:
        calls: None if it makes no calls, or none that can be read.
        reasoning: None if it does not reason.
        left_out: text that stands before or after what is said and is no part of it.
    """

    calls: CallForm | None = None
    reasoning: ReasoningForm | None = None
    left_out: tuple[str, ...] = ()

    @property
    def pieces(self) -> str:
        """All that stands around and within what is said."""
        made = [*self.left_out]
        if self.reasoning is not None:
            made += [self.reasoning.begin, self.reasoning.end]
        if (calls := self.calls) is not None:
            made += [calls.first, calls.middle, calls.between, calls.last, *calls.arguments.marks]
        return "\n".join(made)
