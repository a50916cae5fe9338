"""The part of a tool's schema that a grammar can enforce."""

import json
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kvlite.errors import SettingError
from kvlite.model.answers.form import Tool
from kvlite.model.deep_stack import with_deep_stack
from kvlite.model.grammar import in_a_line, schema_rule

_LOG = logging.getLogger("kvlite.tools")
# Keywords whose values no grammar may be able to express.
_HARD = ("pattern", "format", "patternProperties", "propertyNames", "multipleOf")
# Keywords whose values have names for keys, and those whose values are no schemas.
_MAPS, _DATA = ("properties", "$defs", "definitions"), ("enum", "const", "default", "examples")
# Where in a grammar llguidance found something wrong, before and after what that is.
_WHERE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\s+\d+ \| start: .*", re.S)
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


def followed(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments as far as it can be enforced. What cannot be is left to the
    model, and logged once.

    Raises:
        SettingError: the tool is strict, and something cannot be; names the tool and the property.
    """
    return dict(_followed(tool.name, json.dumps({**tool.parameters}), tool.strict))


@lru_cache(maxsize=512)
def _followed(name: str, written: str, strict: bool) -> Mapping[str, Any]:
    schema: dict[str, Any] = {"type": "object", **json.loads(written)}
    why = _flaw(schema, strict)
    if why is None:
        return schema
    properties = schema.get("properties")
    flaws = _flaws(schema, strict)
    where = f" property {', '.join(map(repr, flaws))}" if flaws else ""
    if strict:
        why = next(iter(flaws.values()), why)
        raise SettingError(
            f"tool {name!r}:{where or ' its parameters'} cannot be enforced ({why}): leave strict "
            "out, or what is named here"
        )
    _LOG.info("tool %r:%s is not enforced (%s)", name, where or " a part of it", why)
    if isinstance(properties, dict):
        kept = {key: _kept(schema, key) if key in flaws else properties[key] for key in properties}
        schema = {**schema, "properties": kept}
    for less in (schema, _without(schema)):
        if _flaw(less, strict) is None:
            return less
    return {"type": "object"}


def _flaws(schema: dict[str, Any], strict: bool) -> dict[str, str]:
    """Properties that cannot be enforced, and why."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    found = {key: _flaw(_alone(schema, key), strict) for key in properties}
    return {key: why for key, why in found.items() if why is not None}


def _kept(schema: dict[str, Any], key: str) -> Any:
    """What can be enforced of a property."""
    less = _without(schema["properties"][key])
    trial = {**schema, "properties": {key: less}}
    return less if _flaw(_alone(trial, key), False) is None else {}


def _alone(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """A schema with one property."""
    return {"type": "object", **defined_in(schema), "properties": {key: schema["properties"][key]}}


def defined_in(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a part of a schema may refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


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


def _flaw(schema: dict[str, Any], strict: bool) -> str | None:
    """Why a schema cannot be enforced; None if it can."""
    from llguidance import LLMatcher

    try:
        lark = f"start: {schema_rule(schema, lenient=not strict)}"
        grammar = LLMatcher.grammar_from_lark(lark)
        is_wrong, said = with_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
    except ValueError as error:
        return _why(str(error))
    return _why(said[0]) if is_wrong else None


def _why(said: str) -> str:
    """What llguidance says is wrong, without the grammar that it was found in."""
    return in_a_line(_WHERE.sub("", said))
