"""`tools` and `tool_choice`: what a model may call, and answers read for calls."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from kvlite.model.grammar import JSON, schema_rule
from kvlite.model.tool_calls import Call, CallReader, Tool, ToolForm, calls_grammar, tool_form
from kvlite.server.fields import checked_field, parsed
from kvlite.server.messages import Fields
from kvlite.server.refusals import Refusal

_LOG = logging.getLogger("kvlite.server")
_TOOLS = 256


class Reader(Protocol):
    """Reads an answer as it comes."""

    def push(self, token_id: int | None, text: str) -> tuple[str, list[Call]]:
        """What is certain with one more token: text, and the calls after it."""
        ...

    def flush(self) -> tuple[str, list[Call]]:
        """The rest, at the end of the answer."""
        ...


class TextReader:
    """Reads an answer that has no calls."""

    def push(self, token_id: int | None, text: str) -> tuple[str, list[Call]]:
        """The token's text."""
        return text, []

    def flush(self) -> tuple[str, list[Call]]:
        """Nothing is held back."""
        return "", []


class Function(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """As the model's side has it."""
        strict = bool(self.strict)
        return Tool(self.name, self.description or "", self.parameters or {}, strict)


@dataclass(frozen=True)
class ToolUse:
    """What one request lets the model call.

    Attributes:
        shown: as the chat template is told them.
        tools: those that may be called.
        needed: whether the answer must be a call.
        several: whether it may be more than one.
    """

    form: ToolForm
    tokenizer: Any
    shown: Sequence[dict[str, Any]]
    tools: Sequence[Tool]
    needed: bool
    several: bool

    def grammar(self, schema: str) -> str:
        """The setting `schema` of an answer that else must follow `schema` ("" for any text).
        Raises Refusal if the arguments of one of the tools cannot be held to its schema."""
        text = ""
        if schema:
            text = schema_rule({"type": "object"} if schema == JSON else json.loads(schema))
        rules = calls_grammar(
            self.form,
            self.tools,
            self.tokenizer,
            text=text,
            needed=self.needed,
            several=self.several,
        )
        return str(checked_field("schema", rules, "tools: the parameters", "tools"))


def reader_of(use: ToolUse | None) -> Reader:
    """A reader of one answer."""
    return TextReader() if use is None else CallReader(use.form, use.tokenizer)


def tool_use(
    tokenizer: Any, tools: Sequence[Any] | None, choice: Any, *, several: bool
) -> ToolUse | None:
    """What a request lets the model call; None if nothing, or if it may and this model cannot: many
    programs send tools with everything that is said. Raises Refusal if a tool is no function, one
    is not there, or one must be called and this model has none.

    Args:
        tools: functions, in either of OpenAI's two ways.
        choice: auto, required, none, or a function, in either way.
        several: whether one answer may make several calls.
    """
    if not tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise Refusal("tool_choice wants a tool, and there is none", param="tool_choice")
        return None
    if len(tools) > _TOOLS:
        raise Refusal(f"there are {len(tools)} tools: {_TOOLS} at most", param="tools")
    known = [_function(each, number).tool() for number, each in enumerate(tools)]
    wanted = _wanted(choice)
    allowed = [each for each in known if wanted in (None, each.name)]
    if not allowed:
        raise Refusal(f"tool_choice {str(wanted)[:60]!r} is no tool here", param="tool_choice")
    needed = choice == "required" or wanted is not None
    if not needed and tool_form(tokenizer) is None:
        _LOG.info("tools are left out (%d), as the model's chat template has none", len(tools))
        return None
    form = require_form(tokenizer)
    shown = [each.plain() for each in known]
    return ToolUse(form, tokenizer, shown, allowed, needed, several and wanted is None)


def require_form(tokenizer: Any) -> ToolForm:
    """How the model writes calls. Raises Refusal if it does not, or in a way that is not known."""
    form = tool_form(tokenizer)
    if form is None:
        said = (
            "this model's chat template has no tools, or writes calls in a way that this server "
            "does not know: leave calls and their results out, or serve a model that has them "
            "(Qwen3, Llama 3.1, Mistral)"
        )
        raise Refusal(said, param="tools")
    return form


def _function(given: Any, number: int) -> Function:
    """A tool; chat completions have what it is under `function`."""
    if not isinstance(given, dict) or given.get("type") != "function":
        kind = given.get("type") if isinstance(given, dict) else given
        said = f"tools[{number}] is of type {str(kind)[:40]!r}: send functions"
        raise Refusal(said, param="tools")
    try:
        return parsed(Function, given.get("function", given))
    except Refusal as error:
        raise Refusal(f"tools[{number}].{error}", param="tools") from None


def _wanted(choice: Any) -> str | None:
    """The function that must be called, if it is a certain one."""
    if choice in (None, "auto", "required"):
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    said = f"tool_choice {str(choice)[:60]!r} is not supported: auto, none, required or a function"
    raise Refusal(said, param="tool_choice")


def call_id() -> str:
    """A name for a call: nine letters and digits, since Mistral's template takes nothing else."""
    return uuid4().hex[:9]
