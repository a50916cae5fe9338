"""Values of arguments that are written without quotes, and their JSON."""

import ast
import json
from collections.abc import Mapping
from typing import Any

_OF_PYTHON: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def types_of(schema: Any) -> set[str]:
    """The types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {*kind} if isinstance(kind, list) else set()
    if not found:
        for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            found |= types_of(each)
    if not found and isinstance(schema.get("enum"), list):
        found = {_OF_PYTHON.get(type(each), ("string",))[0] for each in schema["enum"]}
    return found


def is_text(schema: Any) -> bool:
    """Whether a schema allows strings alone, or does not say what it allows."""
    return types_of(schema) <= {"string"}


def value_of(text: str, schema: Any) -> Any:
    """What a text means where a schema does not allow strings alone: JSON, or Python's repr, if
    that is of a type that it allows; else the text."""
    allowed = types_of(schema)
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        kinds = _OF_PYTHON.get(type(value), ())
        if not isinstance(value, str) and (not allowed or allowed.intersection(kinds)):
            return value
        if isinstance(value, str) and "string" not in allowed:
            return value
    return text


def as_json(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def within_text(text: str) -> str:
    """A part of a string as JSON has it, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
