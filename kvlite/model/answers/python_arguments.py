"""Arguments as Python calls have them: `key="text", number=3`."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlite.model.answers.form import Tool
from kvlite.model.answers.rules import INTEGER, NUMBER, Rules
from kvlite.model.answers.schemas import followed
from kvlite.model.answers.values import (
    Nesting,
    as_json,
    choices_of,
    properties_of,
    referred,
    types_of,
    value_of,
)

_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,199}/"
_ESCAPED = "\\\\[\\\\\"'nrt]"
_TEXT = f"/\"([^\"\\\\\\n]|{_ESCAPED})*\"|'([^'\\\\\\n]|{_ESCAPED})*'/"
_KINDS = {
    "string": _TEXT,
    "integer": INTEGER,
    "number": NUMBER,
    "boolean": '("True" | "False")',
    "null": '"None"',
    "array": "python_list",
    "object": "python_dict",
}


class PythonArguments:
    """Arguments by name, up to the closing parenthesis, which is no part of them."""

    opening, marks = "", ()

    def rule(self, tool: Tool, rules: Rules, *, enforced: bool) -> str:
        """As of `form.Arguments`. What a schema says of strings and numbers is left to the model,
        but for their choices."""
        if not (enforced or tool.strict):
            pair = rules.named(f'{_KEY} "=" {_any(rules)}', "python")
            return f'({pair} ("," " "? {pair})*)?'
        schema = followed(tool, rules.spelled)
        required = {*referred(schema, schema).get("required", ())}
        pairs = []
        for key, each in properties_of(schema).items():
            pair = f"{as_json(f'{key}=')} {_value(each, schema, rules)}"
            pairs.append((rules.named(pair, "python"), key in required))
        return rules.in_order(pairs, '", "', '""', "python")

    def reader(self, parameters: Mapping[str, Any], after: Sequence[str]) -> "PythonReader":
        return PythonReader()


class PythonReader:
    """Turns arguments into JSON, each as soon as it is whole."""

    def __init__(self) -> None:
        self._held, self._count, self._done = "", 0, 0
        self._nesting = Nesting("\"'")

    def push(self, text: str) -> tuple[str, str | None]:
        self._held, made = self._held + text, ""
        while self._done < len(self._held):
            character = self._held[self._done]
            if character in ",)" and self._nesting.is_outside:
                made += self._pair(self._held[: self._done])
                self._held = self._held[self._done :]
                if character == ")":
                    return made + ("}" if self._count else "{}"), self._held
                self._held, self._done = self._held[1:], 0
                continue
            self._nesting.take(character)
            self._done += 1
        return made, None

    def flush(self) -> str:
        return "" if self._count else "{"

    def _pair(self, text: str) -> str:
        key, found, value = text.partition("=")
        if not found:
            return ""
        self._count += 1
        read = as_json(value_of(value.strip(), ()))
        return f"{'{' if self._count == 1 else ', '}{as_json(key.strip())}: {read}"


def _any(rules: Rules) -> str:
    plain = " | ".join(_KINDS[each] for each in ("string", "number", "boolean", "null"))
    rules.define("python_value", f"{plain} | python_list | python_dict")
    rules.define("python_list", '"[" (python_value ("," " "? python_value)*)? "]"')
    rules.define("python_dict", '"{" (python_pair ("," " "? python_pair)*)? "}"')
    rules.define("python_pair", f'{_TEXT} ":" " "? python_value')
    return "python_value"


def _value(schema: Any, root: Mapping[str, Any], rules: Rules) -> str:
    if choices := choices_of(referred(schema, root)):
        return rules.choice(f"{as_json(repr(each))} | {as_json(as_json(each))}" for each in choices)
    value, kinds = _any(rules), types_of(schema, root)
    if not kinds <= _KINDS.keys():
        return value
    return rules.choice(_KINDS[each] for each in sorted(kinds)) if kinds else value
