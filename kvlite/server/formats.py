"""`response_format`, and the same as responses have it: what an answer must follow."""

import json
from collections.abc import Mapping
from typing import Any

from kvlite.errors import SettingError
from kvlite.methods.engine_config import require_meaning
from kvlite.model.grammar import JSON
from kvlite.server.refusals import Refusal


def schema_of(form: Mapping[str, Any] | None, param: str) -> str:
    """The setting `schema` of a request; "" for plain text.

    Args:
        form: with a `type`, and a `schema` of its own or under `json_schema`.
        param: the field that it is.

    Raises:
        Refusal: the schema is missing, or cannot be followed.
    """
    kind = (form or {}).get("type", "text")
    if form is None or kind == "text":
        return ""
    if kind == "json_object":
        return JSON
    if kind != "json_schema":
        said = f"{param} {str(kind)[:40]!r} is not supported: send text, json_object or json_schema"
        raise Refusal(said, param=param)
    named = form.get("json_schema") or form
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise Refusal(f"{param} has no schema: send a JSON Schema as an object", param=param)
    return followed(json.dumps(schema), f"{param}: the schema", param)


def followed(text: str, called: str, param: str) -> str:
    """A schema or grammar that can be followed.

    Raises:
        Refusal: it cannot; it is `called` so.
    """
    try:
        require_meaning("schema", text, called)
    except SettingError as error:
        raise Refusal(str(error), param=param) from None
    return text
