"""Arguments as a JSON object."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvlite.model.answers.form import Tool
from kvlite.model.answers.rules import Rules
from kvlite.model.answers.schemas import followed
from kvlite.model.grammar import schema_rule


class JSONArguments:
    """A JSON object."""

    opening, marks = "{", ()

    def written(self, arguments: Mapping[str, Any]) -> str:
        """As most templates write it."""
        return json.dumps(arguments, ensure_ascii=False)

    def rule(self, tool: Tool, rules: Rules, *, enforced: bool) -> str:
        """As of `form.Arguments`."""
        schema = followed(tool, rules.spelled) if enforced or tool.strict else {"type": "object"}
        return schema_rule(schema, lenient=not tool.strict)

    def reader(self, parameters: Mapping[str, Any], after: Sequence[str]) -> "JSONReader":
        """As of `form.Arguments`."""
        return JSONReader()


class JSONReader:
    """Passes an object on as it comes, up to its last brace."""

    def __init__(self) -> None:
        self._depth, self._in_text, self._escaped, self._begun = 0, False, False, False

    def push(self, text: str) -> tuple[str, str | None]:
        """As of `form.ArgumentReader`."""
        if not self._begun:
            text = text.lstrip()
        for at, character in enumerate(text):
            self._begun = True
            self._take(character)
            if not (self._depth or self._in_text):
                return text[: at + 1], text[at + 1 :]
        return text, None

    def flush(self) -> str:
        """As of `form.ArgumentReader`."""
        return ""

    def _take(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_text:
            self._escaped = character == "\\"
            self._in_text = character != '"'
        else:
            self._in_text = character == '"'
            self._depth += (character in "{[") - (character in "}]")
