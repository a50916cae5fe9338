"""The part of a tool's schema that a grammar can enforce."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from kvlite.config.checked_file import from_json
from kvlite.errors import SettingError
from kvlite.model.answers.form import Tool
from kvlite.model.grammar import in_a_line, schema_rule
from kvlite.model.grammar_trial import TOO_HARD, TooHard, limits, tried
from kvlite.model.in_thread import with_deep_stack

_LOG = logging.getLogger("kvlite.tools")
# Keywords whose values no grammar may be able to express.
_HARD = ("pattern", "format", "patternProperties", "propertyNames", "multipleOf")
# Keywords whose values have names for keys, and those whose values are no schemas.
_VALUES = ("enum", "const")
_MAPS, _DATA = ("properties", "$defs", "definitions"), ("enum", "const", "default", "examples")
# Where in a grammar llguidance found something wrong, before and after what that is.
_WHERE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\s+\d+ \| start: .*", re.S)
_Flaw = Callable[[dict[str, Any]], str | None]
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


def followed(tool: Tool, controls: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The schema of a tool's arguments as far as it can be enforced. What cannot be is left to the
    model, and logged once. Names and choices with one of `controls` are none that can be: where
    nothing else may come, llguidance takes the text for the control token. Raises SettingError,
    with the property, if a strict tool has something that cannot be."""
    return dict(_followed(tool.name, json.dumps({**tool.parameters}), tool.strict, controls))


@lru_cache(maxsize=512)
def _followed(name: str, written: str, strict: bool, controls: frozenset[str]) -> Mapping[str, Any]:
    try:
        schema, where, why = tried(enforceable, written, strict, controls)
    except TooHard:
        schema, where, why = {"type": "object"}, "", TOO_HARD
    if why:
        leave(name, where or " its parameters", why, strict=strict)
    return schema


@lru_cache(maxsize=512)
def leave(tool: str, where: str, why: str, *, strict: bool) -> None:
    """Log once that a part of a tool's schema is left to the model; raises SettingError if
    strict."""
    if strict:
        raise SettingError(
            f"tool {tool!r}:{where} cannot be enforced ({why}): leave strict out, or what is named "
            "here"
        )
    _LOG.info("tool %r:%s is not enforced (%s)", tool, where, why)


def enforceable(
    written: str, strict: bool, controls: frozenset[str]
) -> tuple[dict[str, Any], str, str]:
    """What can be enforced of a schema; and what cannot be, and why, "" if all can."""
    schema: dict[str, Any] = {"type": "object", **from_json(written)}
    flaw = partial(_flaw, strict=strict, controls=controls)
    why = flaw(schema)
    if why is None:
        return schema, "", ""
    properties = schema.get("properties")
    flaws = _flaws(schema, flaw)
    where = f" property {', '.join(map(repr, flaws))}" if flaws else ""
    if strict:
        return {}, where, next(iter(flaws.values()), why)
    if isinstance(properties, dict):
        kept = {
            key: _kept(schema, key, flaw) if key in flaws else properties[key] for key in properties
        }
        schema = {**schema, "properties": kept}
    unnamed = {key: schema[key] for key in schema if key not in ("$schema", "$id")}
    for less in (schema, unnamed, _without(unnamed)):
        if flaw(less) is None:
            return less, where, why
    return {"type": "object"}, where, why


def _flaws(schema: dict[str, Any], flaw: _Flaw) -> dict[str, str]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    found = {key: flaw(_alone(schema, key)) for key in properties}
    return {key: why for key, why in found.items() if why is not None}


def _kept(schema: dict[str, Any], key: str, flaw: _Flaw) -> Any:
    less = _without(schema["properties"][key])
    trial = {**schema, "properties": {key: less}}
    return less if flaw(_alone(trial, key)) is None else {}


def _alone(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return standing({"type": "object", "properties": {key: schema["properties"][key]}}, schema)


def standing(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema as one of its own, which can refer to all of it."""
    if '"$ref"' not in json.dumps(schema):
        return {**schema}
    return {**_moved(schema), "$defs": {"root": _moved(root)}}


def _moved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/root{each[1:]}"
        if key == "$ref" and isinstance(each, str) and each.startswith("#")
        else _moved(each)
        for key, each in schema.items()
    }


def _without(schema: Any, *, names: bool = False) -> Any:
    """A schema without what grammars may not be able to express; if `names`, of each of them."""
    if isinstance(schema, list):
        return [_without(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {key: _without(each) for key, each in schema.items()}
    if str(schema.get("$ref", "#")).partition("#")[0] or not _known(schema.get("type")):
        return {}
    return {
        key: each if key in _DATA else _without(each, names=key in _MAPS)
        for key, each in schema.items()
        if key not in _HARD
    }


def _known(kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else []
    return _TYPES.issuperset(each for each in kinds if isinstance(each, str))


def _said(schema: Any) -> Iterator[str]:
    parts = schema if isinstance(schema, list) else ()
    if isinstance(schema, dict):
        yield from (json.dumps(schema[key], ensure_ascii=False) for key in _VALUES if key in schema)
        maps = [schema[key] for key in _MAPS if isinstance(schema.get(key), dict)]
        yield from (name for each in maps for name in each)
        rest = (each for key, each in schema.items() if key not in (*_MAPS, *_DATA))
        parts = [*rest, *(part for each in maps for part in each.values())]
    for each in parts:
        yield from _said(each)


def _flaw(schema: dict[str, Any], *, strict: bool, controls: frozenset[str]) -> str | None:
    from llguidance import LLMatcher

    if controls and (found := next(filter("\n".join(_said(schema)).__contains__, controls), "")):
        return f"{found} is a control token"
    try:
        lark = f"start: {schema_rule(schema, lenient=not strict)}"
        grammar = LLMatcher.grammar_from_lark(lark)
        is_wrong, said = with_deep_stack(
            lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
        )
    except ValueError as error:
        return _why(str(error))
    return _why(said[0]) if is_wrong else None


def _why(said: str) -> str:
    return in_a_line(_WHERE.sub("", said))
