"""Arguments as Python calls have them: `key="text", number=3`."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlite.model.answers.form import Tool
from kvlite.model.answers.rules import Rules
from kvlite.model.answers.schemas import followed
from kvlite.model.answers.values import (
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
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": "/-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "boolean": '("True" | "False")',
    "null": '"None"',
    "array": "python_list",
    "object": "python_dict",
}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonArguments:
    """Arguments by name, up to the closing parenthesis, which is no part of them."""

    opening, marks = "", ()

    def written(self, arguments: Mapping[str, Any]) -> str:
        """As of `form.Arguments`."""
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())

    def rule(self, tool: Tool, rules: Rules, *, enforced: bool) -> str:
        """As of `form.Arguments`. What a schema says of strings and numbers is left to the model,
        but for their choices."""
        if not (enforced or tool.strict):
            pair = rules.named(f'{_KEY} "=" {_any(rules)}', "python")
            return f'({pair} ("," " "? {pair})*)?'
        schema = followed(tool, rules.spelled)
        required = {*referred(schema, schema).get("required", ())}
        # What may follow, with and without an argument before it, from the last to the first.
        first = later = '""'
        for key, each in reversed(properties_of(schema).items()):
            head = rules.named(f"{as_json(f'{key}=')} {_value(each, schema, rules)}", "python")
            begun, going = f"{head} {later}", f'", " {head} {later}'
            if key not in required:
                begun, going = f"({begun} | {first})", f"({going} | {later})"
            first, later = rules.named(begun, "python"), rules.named(going, "python")
        return first

    def reader(self, parameters: Mapping[str, Any], after: Sequence[str]) -> "PythonReader":
        """As of `form.Arguments`."""
        return PythonReader()


class PythonReader:
    """Turns arguments into JSON, each as soon as it is whole."""

    def __init__(self) -> None:
        self._held, self._count, self._done = "", 0, 0
        self._open, self._quote, self._escaped = list[str](), "", False

    def push(self, text: str) -> tuple[str, str | None]:
        """As of `form.ArgumentReader`."""
        self._held, made = self._held + text, ""
        while self._done < len(self._held):
            character = self._held[self._done]
            if character in ",)" and not (self._open or self._quote):
                made += self._pair(self._held[: self._done])
                self._held = self._held[self._done :]
                if character == ")":
                    return made + ("}" if self._count else "{}"), self._held
                self._held, self._done = self._held[1:], 0
                continue
            self._take(character)
            self._done += 1
        return made, None

    def flush(self) -> str:
        """As of `form.ArgumentReader`."""
        return "" if self._count else "{"

    def _pair(self, text: str) -> str:
        key, found, value = text.partition("=")
        if not found:
            return ""
        self._count += 1
        read = as_json(value_of(value.strip(), ()))
        return f"{'{' if self._count == 1 else ', '}{as_json(key.strip())}: {read}"

    def _take(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif character in "\"'":
            self._quote = character
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()


def _any(rules: Rules) -> str:
    """A rule of any value."""
    if "python_value" not in "".join(rules.lines):
        plain = " | ".join(_KINDS[each] for each in ("string", "number", "boolean", "null"))
        rules.lines += [
            f"python_value: {plain} | python_list | python_dict",
            'python_list: "[" (python_value ("," " "? python_value)*)? "]"',
            'python_dict: "{" (python_pair ("," " "? python_pair)*)? "}"',
            f'python_pair: {_TEXT} ":" " "? python_value',
        ]
    return "python_value"


def _value(schema: Any, root: Mapping[str, Any], rules: Rules) -> str:
    if choices := choices_of(referred(schema, root)):
        return rules.choice(f"{as_json(repr(each))} | {as_json(as_json(each))}" for each in choices)
    value, kinds = _any(rules), types_of(schema, root)
    if not kinds <= _KINDS.keys():
        return value
    return rules.choice(_KINDS[each] for each in sorted(kinds)) if kinds else value
