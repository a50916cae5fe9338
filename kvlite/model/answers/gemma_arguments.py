"""Arguments as Gemma 4 writes them: `{key:<|"|>text<|"|>,number:3}`, keys in order and bare, texts
between tokens and without escapes."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlite.model.answers.form import Tool
from kvlite.model.answers.rules import INTEGER, NUMBER, Rules
from kvlite.model.answers.schemas import followed
from kvlite.model.answers.values import (
    as_json,
    choices_of,
    overlap,
    properties_of,
    referred,
    types_of,
    value_of,
    within_text,
)

QUOTE = '<|"|>'
# References within what is referred to; what is deeper is any.
_DEEPEST = 2
_KEY = '/[^:,{}\\[\\]<>"\\n]{1,200}/'
_CLOSING = {"{": "}", "[": "]"}


class GemmaArguments:
    """An object."""

    opening, marks = "{", (QUOTE,)

    def rule(self, tool: Tool, rules: Rules, *, enforced: bool) -> str:
        """As of `form.Arguments`. What a schema says of strings and numbers is left to the model,
        but for their choices."""
        schema = followed(tool, rules.spelled) if enforced or tool.strict else {}
        return _object(schema, schema, rules)

    def reader(self, parameters: Mapping[str, Any], after: Sequence[str]) -> "GemmaReader":
        return GemmaReader()


class GemmaReader:
    """Turns an object into JSON as it comes."""

    def __init__(self) -> None:
        self._held, self._open = "", list[str]()
        self._in_text = self._wants_key = False

    def push(self, text: str) -> tuple[str, str | None]:
        self._held, made = self._held + text, list[str]()
        while self._held:
            taken = self._quoted() if self._in_text else self._plain()
            if taken is None:
                break
            made.append(taken)
            if not (self._open or self._in_text):
                rest, self._held = self._held, ""
                return "".join(made), rest
        return "".join(made), None

    def flush(self) -> str:
        return within_text(self._held) if self._in_text else ""

    def _quoted(self) -> str | None:
        text, found, rest = self._held.partition(QUOTE)
        if found:
            self._held, self._in_text = rest, False
            return f'{within_text(text)}"'
        certain = len(self._held) - overlap(self._held, QUOTE)
        text, self._held = self._held[:certain], self._held[certain:]
        return within_text(text) or None

    def _plain(self) -> str | None:
        first = self._held[0]
        if self._wants_key and first not in "}, \n":
            key, found, rest = self._held.partition(":")
            if not found:
                return None
            self._held, self._wants_key = rest, False
            return f"{as_json(key.strip().removeprefix(QUOTE).removesuffix(QUOTE))}: "
        if first == "<":
            if len(self._held) < len(QUOTE) and QUOTE.startswith(self._held):
                return None
            if self._held.startswith(QUOTE):
                self._held, self._in_text = self._held[len(QUOTE) :], True
                return '"'
        if first not in "{}[], \n":
            end = next((at for at, each in enumerate(self._held) if each in "{}[],"), None)
            if end is None:
                return None
            word, self._held = self._held[:end], self._held[end:]
            return as_json(value_of(word.strip(), ()))
        self._held = self._held[1:]
        if first in "{[":
            self._open.append(_CLOSING[first])
        elif first in "}]" and self._open:
            first = self._open.pop()
        self._wants_key = first in "{," and self._open[-1:] == ["}"]
        return ", " if first == "," else first


def literal(value: Any) -> str:
    """A value as a model writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(literal, value)) + "]"
    return as_json(value)


def _any(rules: Rules) -> str:
    text = f"{rules.text(QUOTE)} {rules.until(QUOTE)}"
    plain = f'{text} | {NUMBER} | "true" | "false" | "null"'
    pair = f'{_KEY} ":" gemma_value'
    rules.define("gemma_value", f"{plain} | gemma_list | gemma_map")
    rules.define("gemma_list", '"[" (gemma_value ("," gemma_value)*)? "]"')
    rules.define("gemma_map", f'"{{" ({pair} ("," {pair})*)? "}}"')
    return "gemma_value"


def _object(schema: Mapping[str, Any], root: Mapping[str, Any], rules: Rules, deep: int = 0) -> str:
    schema = referred(schema, root)
    properties = properties_of(schema)
    if not properties:
        _any(rules)
        return '"{}"' if schema.get("additionalProperties") is False else "gemma_map"
    required = {*schema.get("required", ())}
    pairs = []
    for key in sorted(properties):
        pair = f"{as_json(f'{key}:')} {_value(properties[key], root, rules, deep)}"
        pairs.append((rules.named(pair, "gemma"), key in required))
    listed = rules.in_order(pairs, '","', '"}"', "gemma")
    return f'"{{" {listed}'


def _value(schema: Any, root: Mapping[str, Any], rules: Rules, deep: int) -> str:
    if isinstance(schema, Mapping) and "$ref" in schema:
        if deep == _DEEPEST:
            return _any(rules)
        schema, deep = referred(schema, root), deep + 1
    text = rules.text(QUOTE)
    if choices := choices_of(referred(schema, root)):
        return rules.choice(
            f"{text} {rules.said(each)} {text}"
            if isinstance(each, str)
            else rules.said(literal(each))
            for each in choices
        )
    kinds, value = types_of(schema, root), _any(rules)
    if kinds == {"object"}:
        return _object(schema, root, rules, deep)
    if kinds == {"array"}:
        item = rules.named(_value(schema.get("items"), root, rules, deep), "gemma")
        least = referred(schema, root).get("minItems") or 0
        return f'"[" ({item} ("," {item})*){"" if least else "?"} "]"'
    made = {
        "string": f"{text} {rules.until(QUOTE)}",
        "integer": INTEGER,
        "number": NUMBER,
        "boolean": '("true" | "false")',
        "null": '"null"',
        "array": "gemma_list",
        "object": "gemma_map",
    }
    is_known = kinds and kinds <= made.keys()
    return rules.choice(made[each] for each in sorted(kinds)) if is_known else value
