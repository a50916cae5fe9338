"""What an answer must follow, in the words of the servers that clients are written for: OpenAI's
`response_format`, vLLM's `structured_outputs` and `guided_*`, llama.cpp's `grammar` and
`json_schema`, SGLang's `regex` and `ebnf`."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvlite.config.plain_json import NotPlain, read_json
from kvlite.model.grammar import JSON, in_a_line, is_schema
from kvlite.server.messages import Fields
from kvlite.server.refusals import Refusal

# The most texts to choose from, and the most characters of GBNF, which take a second to translate.
_MOST_CHOICES, _LONGEST = 10_000, 1 << 16
_ANY = {"type": "object"}
# What the fields hold that have one thing each.
_HOLDS = {
    **dict.fromkeys(("json_schema", "guided_json"), "json"),
    **dict.fromkeys(("regex", "guided_regex"), "regex"),
    **dict.fromkeys(("grammar", "ebnf", "guided_grammar"), "grammar"),
    **dict.fromkeys(("guided_choice",), "choice"),
    **dict.fromkeys(("structural_tag",), "structural_tag"),
}
# Types of `response_format`, what each holds, and under which names.
_TYPES = {
    "json_object": ("json", ("schema",)),
    "json_schema": ("json", ("schema",)),
    "json": ("json", ("value", "schema")),
    "regex": ("regex", ("pattern", "value", "regex")),
    "grammar": ("grammar", ("grammar", "value")),
}
_LARK = re.compile(r"^[ \t]*[?!]?(start\s*:(?!:=)|%llguidance\b)", re.MULTILINE)
# What would end a regular expression in Lark.
_ENDS = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_IN_PATTERN = re.compile(r"\\.|[/\n]", re.DOTALL)
# A character of a GBNF grammar by its number, which llguidance's reader of GBNF takes from four
# digits without zeros before them; and a backslash, which is none.
_NUMBERED = re.compile(r"\\(?:\\|u0([0-9A-Fa-f]{3}))")


class Formatted(Fields):
    """Fields of a request that say what its answer must follow."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | None = None
    guided_json: dict[str, Any] | str | None = None
    regex: str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    grammar: str | None = None
    ebnf: str | None = None
    guided_grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


@dataclass(frozen=True)
class Format:
    """What an answer must follow.

    Attributes:
        field: of the request, where it is said.
        schema: the setting: `json`, a JSON Schema, or a Lark grammar.
    """

    field: str
    schema: str

    @property
    def param(self) -> str:
        """The field in OpenAI's errors."""
        return _param(self.field)

    @property
    def is_json(self) -> bool:
        """Whether it is JSON."""
        return is_schema(self.schema)


def format_of(request: Formatted, usual: Mapping[str, Any] | None, field: str) -> Format | None:
    """What the answer to a request must follow; None for any text. Raises Refusal if two fields say
    so, or what one says cannot be followed.

    Args:
        usual: as OpenAI has it, with a `type`.
        field: where that is.
    """
    found = [*_said(request, usual, field)]
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(name for name, _, _ in found))
        raise Refusal(f"{names}: an answer follows one of them, leave the others out", param=field)
    for name, kind, value in found:
        return Format(name, _MADE[kind](name, value))
    return None


def _said(
    request: Formatted, usual: Mapping[str, Any] | None, field: str
) -> Iterator[tuple[str, str, Any]]:
    """Where something is said, what that is, and itself."""
    if usual is not None and (kind := str(usual.get("type", "text"))) != "text":
        if kind not in _TYPES:
            said = f"{field} {kind[:40]!r} is not supported: send text, json_object or json_schema"
            raise Refusal(said, param=field)
        yield field, *_of_type(kind, usual)
    for name, value in (request.structured_outputs or {}).items():
        holds = {**dict.fromkeys(_HOLDS.values()), "json_object": None}
        if name in holds and value not in (None, "", False):
            where = f"structured_outputs.{name}"
            yield (where, "json", _ANY) if name == "json_object" else (where, name, value)
    for name, kind in _HOLDS.items():
        if (value := getattr(request, name)) not in (None, ""):
            yield name, kind, value


def _of_type(kind: str, form: Mapping[str, Any]) -> tuple[str, Any]:
    """What `response_format` holds; a schema may be in an object of its own."""
    holds, names = _TYPES[kind]
    named = form.get("json_schema") or form
    within = named if isinstance(named, Mapping) else {}
    value = next((within[name] for name in names if within.get(name) is not None), None)
    return holds, value or _ANY if kind == "json_object" else value


def _of_schema(field: str, value: Any) -> str:
    if isinstance(value, str):
        try:
            value = read_json(value)
        except NotPlain as error:
            raise Refusal(f"{field}: {error}", param=_param(field)) from None
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise _refused(field, "has no schema: send a JSON Schema as an object")
    return JSON if value == _ANY else json.dumps(value)


def _of_regex(field: str, value: Any) -> str:
    pattern = _text(field, value, "a regular expression")
    return f"start: /{re.sub(_IN_PATTERN, lambda at: _ENDS.get(at[0], at[0]), pattern)}/"


def _of_choice(field: str, value: Any) -> str:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _refused(field, "is not a list of texts")
    if not 0 < len(value) <= _MOST_CHOICES:
        raise _refused(field, f"has {len(value):,} texts: give 1 to {_MOST_CHOICES:,}")
    return "start: " + " | ".join(map(json.dumps, value))


def _of_grammar(field: str, value: Any) -> str:
    """In Lark, or in GBNF, llama.cpp's and xgrammar's, which has `::=`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = _text(field, value, "a grammar")
    if "::=" not in text or _LARK.search(text):
        return text
    if len(text) > _LONGEST:
        raise _refused(field, f"has {len(text):,} characters: give {_LONGEST:,} at most")
    try:
        return gbnf_to_lark(_NUMBERED.sub(_character, text))
    except Exception as error:  # of all kinds
        why = in_a_line(str(error))
        said = f"is no GBNF grammar ({why}): correct it, or send one in Lark"
        raise _refused(field, said) from None


def _character(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    number = int(found[1], 16)
    return f"\\x{number:02x}" if number < 128 else chr(number)


def _of_tag(field: str, value: Any) -> str:
    raise _refused(field, "is not supported: send tools, or a grammar in Lark")


_MADE = {
    "json": _of_schema,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "structural_tag": _of_tag,
}


def _text(field: str, value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _refused(field, f"has no text: send {what}")
    return value


def _refused(field: str, said: str) -> Refusal:
    return Refusal(f"{field} {said}", param=_param(field))


def _param(field: str) -> str:
    return field if field == "text.format" else field.partition(".")[0]
