"""Tools of requests, as what the model may call."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from kvlite.engine.grammar import Grammar
from kvlite.errors import SettingError
from kvlite.model.answers.form import Tool
from kvlite.model.answers.grammar import answer_grammar
from kvlite.model.grammar import is_schema, whole_schema_rule
from kvlite.model.load import LoadedModel
from kvlite.server.fields import parsed
from kvlite.server.messages import Fields
from kvlite.server.refusals import Refusal

_LOG = logging.getLogger("kvlite.server")
_Fields = TypeVar("_Fields", bound=Fields)
_TOOLS = 256
_NAME = re.compile(r"[\w./-]{1,128}")


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

    shown: Sequence[dict[str, Any]] = ()
    tools: Sequence[Tool] = ()
    needed: bool = False
    several: bool = True

    def grammar(
        self, model: LoadedModel, schema: str, most_reasoning: int | None, *, opened: bool
    ) -> str:
        """The setting `schema` of an answer that else must follow `schema` ("" for any text).

        Args:
            most_reasoning: tokens of reasoning.
            opened: whether the prompt begins reasoning.

        Raises:
            Refusal: a tool that is strict, or must be called, has a schema that cannot be enforced.
        """
        if schema and not is_schema(schema):
            raise Refusal("a grammar and tools do not go together: leave one out", param="tools")
        try:
            text = answer_grammar(
                model.answer_form,
                model.tokenizer,
                model.vocabulary.trie,
                self.tools,
                text=schema and whole_schema_rule(schema),
                needed=self.needed,
                several=self.several,
                opened=opened,
                most_reasoning=most_reasoning,
                ends=model.stop_ids,
            )
            if text:
                Grammar(model.vocabulary, text)
        except SettingError as error:
            said = str(error).replace("--schema", "the parameters of these tools")
            raise Refusal(said, param="tools") from None
        return text


def tool_use(
    model: LoadedModel, tools: Sequence[Any] | None, choice: Any, *, several: bool
) -> ToolUse:
    """What a request lets the model call; nothing if the model makes no calls, unless it must: many
    programs send tools with everything that is said. Raises Refusal if a tool is no function, one
    is not there, or one must be called and this model makes no calls.

    Args:
        tools: functions, in either of OpenAI's two ways.
        choice: auto, required, none, a function, or some of the tools, in either way.
        several: whether one answer may make several calls.
    """
    mode, names = _chosen(choice)
    if not tools or mode == "none":
        if mode not in ("none", "auto") or names is not None:
            raise Refusal("tool_choice wants a tool, and there is none", param="tool_choice")
        return ToolUse()
    require_few(tools)
    known = {
        tool.name: tool
        for tool in (
            function_at(each, f"tools[{number}]").tool() for number, each in enumerate(tools)
        )
    }
    for name in names or ():
        if name not in known:
            raise Refusal(f"tool_choice: {name[:60]!r} is no tool here", param="tool_choice")
    if model.answer_form.calls is None:
        if mode != "auto":
            said = (
                "this model's chat template has no tools, or writes calls in a way that is not "
                "known here: leave tool_choice out, or serve a model that has them (Qwen3, "
                "Llama 3.1, Mistral)"
            )
            raise Refusal(said, param="tools")
        _LOG.info("tools are left out (%d), as the model's chat template has none", len(tools))
        return ToolUse()
    shown = [each.plain() for each in known.values()]
    allowed = [known[name] for name in (names or known)]
    return ToolUse(shown, allowed, mode in ("required", "named"), several and mode != "named")


def require_few(tools: Sequence[Any]) -> None:
    """Raises Refusal for more tools than are taken."""
    if len(tools) > _TOOLS:
        raise Refusal(f"there are {len(tools)} tools: {_TOOLS} at most", param="tools")


def function_at(given: Any, where: str) -> Function:
    """A tool that is in a request at this place; chat completions have what it is under `function`.
    Raises Refusal if it is no function."""
    if not isinstance(given, dict) or given.get("type", "function") != "function":
        kind = given.get("type") if isinstance(given, dict) else given
        said = f"{where} is of type {str(kind)[:40]!r}: send functions"
        raise Refusal(said, param="tools")
    made = parsed_at(Function, given.get("function", given), where)
    if not _NAME.fullmatch(made.name):
        said = f"{where}.name {made.name[:40]!r}: send letters, digits and any of _ - . /"
        raise Refusal(said, param="tools")
    return made


def parsed_at(kind: type[_Fields], given: Any, where: str) -> _Fields:
    """The fields of a tool that is in a request at this place; errors are those of `parsed`."""
    if not isinstance(given, Mapping):
        raise Refusal(f"{where} is not an object", param="tools")
    try:
        return parsed(kind, given)
    except Refusal as error:
        raise Refusal(f"{where}.{error}", param="tools") from None


def _chosen(choice: Any) -> tuple[str, list[str] | None]:
    """auto, required, named or none; and the tools that may be called, None for all."""
    if choice in (None, "auto", "required", "none"):
        return choice or "auto", None
    if choice == "any":  # Mistral's word
        return "required", None
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        own = choice.get(str(kind), choice)
        if kind == "function" and (name := _name(choice)) is not None:
            return "named", [name]
        if kind == "allowed_tools" and isinstance(own, Mapping):
            mode, tools = own.get("mode", "auto"), own.get("tools")
            names = [_name(each) for each in tools] if isinstance(tools, list) else []
            found = [each for each in names if each is not None]
            if mode in ("auto", "required") and found and len(found) == len(names):
                return mode, found
    said = (
        f"tool_choice {str(choice)[:60]!r} is not supported: send auto, none, required, a function "
        "or allowed_tools"
    )
    raise Refusal(said, param="tool_choice")


def _name(given: Any) -> str | None:
    """The name of a function that a choice names."""
    own = given.get("function", given) if isinstance(given, Mapping) else None
    name = own.get("name") if isinstance(own, Mapping) else None
    return name if isinstance(name, str) else None


def call_id() -> str:
    """A name for a call: nine letters and digits, since Mistral's template takes nothing else."""
    return uuid4().hex[:9]
