"""Values of arguments that are written without quotes, and their JSON."""

import ast
import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
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
# Keywords that only schemas of one type have.
_OF_KEYWORDS = {"properties": "object", "additionalProperties": "object", "items": "array"}
# Schemas within each other, and references, that are followed.
_DEEPEST = 16


def types_of(schema: Any, root: Mapping[str, Any] = MappingProxyType({})) -> set[str]:
    """The types that a schema allows; none if it does not say. `root` is what it may refer to."""
    return _types(schema, root, _DEEPEST)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    schema = resolved(schema, root) if depth else {}
    kind = schema.get("type")
    if isinstance(kind, str | list):
        return {kind} if isinstance(kind, str) else {each for each in kind if isinstance(each, str)}
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        return {_OF_PYTHON.get(type(each), ("string",))[0] for each in choices}
    found = set[str]()
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            found |= _types(each, root, depth - 1)
    if not found:
        found = {kind for key, kind in _OF_KEYWORDS.items() if key in schema}
    return found


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema; where it refers to one of the definitions of `root`, that one."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping):
            return {}
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        where, _, name = reference.removeprefix("#/").rpartition("/")
        defined = root.get(where)
        schema = defined.get(name) if isinstance(defined, Mapping) else None
    return {}


def value_of(text: str, allowed: Collection[str]) -> Any:
    """What a text means where not strings alone are allowed: JSON, or Python's repr, if that is of
    a type that is allowed (any, if none is named); else the text."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        kinds = _OF_PYTHON.get(type(value), ())
        if not isinstance(value, str) and (not allowed or not {*allowed}.isdisjoint(kinds)):
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
