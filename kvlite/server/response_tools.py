"""Tools as responses have them, of which templates know functions alone: groups of them, and tools
that take any text. Calls are told by the names and in the way that the request has."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlite.server.messages import Fields
from kvlite.server.response_input import CUSTOM, FUNCTION, LONGEST_NAME, ToolName, group_of
from kvlite.server.tools import Function, function_at, parsed_at, require_few

_LOG = logging.getLogger("kvlite.server")
# Tools that OpenAI's own servers run.
_HOSTED = re.compile(
    r"(web_search|computer)\w*|file_search|code_interpreter|image_generation|mcp|tool_search|"
    "(local_)?shell"
)
# What calls of a tool are, by its type, which is the type of a choice of it, too.
_CALLS = {"function": FUNCTION, "custom": CUSTOM}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
          "additionalProperties": False}  # fmt: skip


class Group(Fields):
    """Tools under a name of their own."""

    name: str
    description: str | None = None
    tools: list[Any]


class InputForm(Fields):
    """What the input of a tool must follow: a grammar, if anything."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class Custom(Fields):
    """A tool that takes any text."""

    name: str
    description: str | None = None
    format: InputForm | None = None

    def function(self) -> dict[str, Any]:
        """As a function of that text, whose grammar is told in words."""
        told = [self.description or ""]
        if self.format is not None and self.format.definition:
            syntax = self.format.syntax or self.format.type
            told.append(f"input follows this grammar ({syntax}):\n{self.format.definition}")
        said = "\n\n".join(filter(None, told))
        return {"name": self.name, "description": said, "parameters": _INPUT}


class ResponseTools:
    """Tools of one request as functions, and the way back.

    Attributes:
        functions: as `tool_use` takes them.
        choice: its `tool_choice`, by the names of `functions`.
    """

    def __init__(self, tools: Sequence[Any] | None, choice: Any) -> None:
        """Raises Refusal if one is of an unknown type, or not as its type has to be."""
        leaves = [*_leaves(tools or ())]
        require_few(leaves)
        hosted = {kind[:40]: None for *_, each in leaves if _HOSTED.fullmatch(kind := _kind(each))}
        if hosted:
            _LOG.info("tools are left out that this server does not run: %s", ", ".join(hosted))
        found = [_tool(*leaf) for leaf in leaves if not _HOSTED.fullmatch(_kind(leaf[-1]))]
        taken = {function.name for tool, function in found if tool == _plain(function)}
        self._shown = dict[ToolName, str]()
        for tool, function in found:
            if tool not in self._shown:
                is_plain = tool == _plain(function)
                self._shown[tool] = tool.name if is_plain else _free(tool.flat, taken)
                taken.add(self._shown[tool])
        self._named = {shown: tool for tool, shown in self._shown.items()}
        self.functions: list[dict[str, Any]] = [
            {"type": "function", "function": {**function.model_dump(), "name": self.shown(tool)}}
            for tool, function in found
        ]
        self.choice = self._chosen(choice)

    def shown(self, tool: ToolName) -> str:
        """The name by which the template is told of a tool, if only in what was called before."""
        return self._shown.get(tool, tool.flat)

    def named(self, shown: str) -> ToolName:
        """What the client calls a tool that the model called; a function, if there is none."""
        return self._named.get(shown) or ToolName(FUNCTION, shown)

    def _chosen(self, choice: Any) -> Any:
        tools = choice.get("tools") if isinstance(choice, Mapping) else None
        if isinstance(tools, list):
            return {**choice, "tools": [self._named_by(each) for each in tools]}
        return self._named_by(choice)

    def _named_by(self, choice: Any) -> Any:
        """The choice of one tool, by the name that is shown."""
        if not isinstance(choice, Mapping):
            return choice
        kind, name = _CALLS.get(str(choice.get("type"))), choice.get("name")
        if kind is None or not isinstance(name, str):
            return choice
        of_name = [
            shown
            for tool, shown in self._shown.items()
            if (tool.kind, tool.name) == (kind, name)
            and choice.get("namespace", tool.namespace) == tool.namespace
        ]
        return {"type": "function", "name": of_name[0] if of_name else name}


def _plain(function: Function) -> ToolName:
    return ToolName(FUNCTION, function.name)


def _free(name: str, taken: set[str]) -> str:
    """A name like this that no other tool has."""
    number, made = 1, name
    while made in taken:
        number += 1
        made = f"{name[: LONGEST_NAME - 1 - len(str(number))]}_{number}"
    return made


def _leaves(tools: Sequence[Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Each tool after where it stands, the group that it is in, and what is told of that with the
    first of its tools."""
    for number, each in enumerate(tools):
        where = f"tools[{number}]"
        if _kind(each) != "namespace":
            yield where, "", "", each
            continue
        group = parsed_at(Group, each, where)
        told = f"{group.name}: {group.description}\n\n" if group.description else ""
        for inner, tool in enumerate(group.tools):
            yield f"{where}.tools[{inner}]", group_of(group.name), "" if inner else told, tool


def _tool(where: str, namespace: str, told: str, given: Any) -> tuple[ToolName, Function]:
    kind = _kind(given)
    if kind == "custom":
        given = parsed_at(Custom, given, where).function()
    function = function_at(given, where)
    said = function.model_copy(update={"description": told + (function.description or "")})
    return ToolName(_CALLS.get(kind, FUNCTION), function.name, namespace), said


def _kind(given: Any) -> str:
    return str(given.get("type", "function")) if isinstance(given, Mapping) else ""
