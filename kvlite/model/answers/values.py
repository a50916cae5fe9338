"""Values of arguments that are written without quotes, and their JSON."""

import ast
import json
from collections.abc import Collection, Mapping
from typing import Any

from kvlite.config.checked_file import from_json

_OF_PYTHON: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
# Keywords that only schemas of one type have.
_OF_KEYWORDS = {"properties": "object", "additionalProperties": "object", "items": "array"}


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of arguments; those that are required need not be described."""
    schema = referred(schema, schema)
    found, required = schema.get("properties"), schema.get("required")
    made = {**found} if isinstance(found, Mapping) else {}
    return {**dict.fromkeys(required if isinstance(required, list) else ()), **made}


def referred(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema says, which may stand in another place of the whole; nothing if it is none."""
    seen = set[str]()
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        path = schema["$ref"]
        if path in seen or not path.startswith("#"):
            return {}
        seen.add(path)
        schema = root
        for name in filter(None, path[1:].split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists; none if it does not."""
    if "const" in schema:
        return [schema["const"]]
    return _list(schema, "enum")


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 16) -> set[str]:
    """The types that a schema, a part of `root`, allows; none if it does not say."""
    schema = referred(schema, root) if depth else {}
    kind = schema.get("type")
    found = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    if not found:
        for each in (*_list(schema, "anyOf"), *_list(schema, "oneOf"), *_list(schema, "allOf")):
            found |= types_of(each, root, depth - 1)
    found = found or {_OF_PYTHON.get(type(each), ("string",))[0] for each in choices_of(schema)}
    return found or {kind for key, kind in _OF_KEYWORDS.items() if key in schema}


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a schema allows strings alone, or does not say what it allows."""
    return types_of(schema, root) <= {"string"}


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def value_of(text: str, allowed: Collection[str]) -> Any:
    """What a text means where not strings alone are allowed: JSON, or Python's repr, if that is of
    a type that is; else the text."""
    for read in (from_json, ast.literal_eval):
        try:
            value = read(text.strip())
            as_json(value)
        except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        kinds = _OF_PYTHON.get(type(value), ())
        if not isinstance(value, str) and (not allowed or not {*kinds}.isdisjoint(allowed)):
            return value
        if isinstance(value, str) and "string" not in allowed:
            return value
    return text


def as_json(value: Any) -> str:
    """A value as JSON. Raises ValueError or TypeError if it has none."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class Nesting:
    """Whether a text, taken character by character, is within brackets or quotes."""

    def __init__(self, quotes: str) -> None:
        """`quotes` are the characters that texts may be between."""
        self._quotes, self._depth, self._quote, self._escaped = quotes, 0, "", False

    @property
    def is_outside(self) -> bool:
        """Whether what comes next is in none."""
        return not (self._depth or self._quote)

    def take(self, character: str) -> None:
        """One more character."""
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif character in self._quotes:
            self._quote = character
        else:
            self._depth += (character in "([{") - (character in ")]}" and self._depth > 0)


def within_text(text: str) -> str:
    """A part of a string as JSON has it, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with, and is longer than."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
