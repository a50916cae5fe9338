"""Arguments as a JSON object."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlite.model.answers.form import Tool
from kvlite.model.answers.rules import Rules
from kvlite.model.answers.schemas import followed
from kvlite.model.answers.values import Nesting
from kvlite.model.grammar import schema_rule


class JSONArguments:
    """A JSON object."""

    opening, marks = "{", ()

    def rule(self, tool: Tool, rules: Rules, *, enforced: bool) -> str:
        schema = followed(tool, rules.spelled) if enforced or tool.strict else {"type": "object"}
        return schema_rule(schema, lenient=not tool.strict)

    def reader(self, parameters: Mapping[str, Any], after: Sequence[str]) -> "JSONReader":
        return JSONReader()


class JSONReader:
    """Passes an object on as it comes, up to its last brace."""

    def __init__(self) -> None:
        self._nesting, self._begun = Nesting('"'), False

    def push(self, text: str) -> tuple[str, str | None]:
        if not self._begun:
            text = text.lstrip()
        for at, character in enumerate(text):
            self._begun = True
            self._nesting.take(character)
            if self._nesting.is_outside:
                return text[: at + 1], text[at + 1 :]
        return text, None

    def flush(self) -> str:
        return ""
