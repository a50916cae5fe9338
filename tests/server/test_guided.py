"""What answers must follow, in other servers' words, and schemas as clients write them."""

import json
import re
from typing import Any

import pytest

from tests.server.conftest import Server, said
from tests.server.test_refusing import require_error

CHAT = "/v1/chat/completions"
PATHS = {CHAT: "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
DIGIT: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["a"],
    "additionalProperties": False,
}
A_DIGIT = r'\s*\{\s*"a"\s*:\s*[1-5]\s*\}'
GBNF = 'root ::= answer ws # either\nanswer ::= "yes" | [n\\u006f]{2}\nws ::= "\\n"'


def form(kind: str, **given: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **given}}


# What is sent, and what the answer is like.
GUIDED: dict[str, tuple[dict[str, Any], str]] = {
    "guided_choice": ({"guided_choice": ['"no"\n/', "😀"]}, '"no"\n/|😀'),
    "guided_regex": ({"guided_regex": r"^[A-C]{3}/\d$"}, r"[A-C]{3}/\d"),
    "guided_json": ({"guided_json": DIGIT}, A_DIGIT),
    "guided_grammar": ({"guided_grammar": 'start: "a" B\nB: /[0-9]{2}/'}, "a[0-9]{2}"),
    "json": ({"structured_outputs": {"json": DIGIT, "whitespace_pattern": None}}, A_DIGIT),
    "regex": ({"structured_outputs": {"regex": "x{4}\ny", "json": None}}, "x{4}\ny"),
    "grammar": ({"structured_outputs": {"grammar": GBNF}}, "(yes|[no]{2})\n"),
    "llama.cpp's grammar": ({"grammar": GBNF, "json_schema": None}, "(yes|[no]{2})\n"),
    "llguidance's": ({"grammar": '%llguidance {}\nstart: "::="'}, "::="),
    "llama.cpp's json_schema": ({"json_schema": DIGIT, "grammar": ""}, A_DIGIT),
    "SGLang's ebnf": ({"ebnf": 'root ::= "ab" | "cd"', "regex": None}, "ab|cd"),
    "SGLang's regex": ({"regex": "(ab|cd){2}"}, "(ab|cd){2}"),
}
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "json_object with a schema": (form("json_object", schema=DIGIT), A_DIGIT),
    "in json_schema": (form("json_object", json_schema={"schema": DIGIT}), A_DIGIT),
    "json_schema": (form("json_schema", json_schema={"name": "a", "schema": DIGIT}), A_DIGIT),
    "schema as text": (form("json_schema", json_schema={"schema": json.dumps(DIGIT)}), A_DIGIT),
    "TGI's": (form("json", value=DIGIT), A_DIGIT),
    "Together's": (form("regex", pattern="x{3}"), "x{3}"),
    "text, and a regex": ({**form("text"), "regex": "x{3}"}, "x{3}"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two": ({"guided_json": DIGIT, "guided_regex": "a"}, "guided_json and guided_regex: an answer"),
    "beside response_format": (
        {**form("json_object"), "grammar": 'root ::= "z"'},
        "response_format and grammar: an answer follows one",
    ),
    "structural_tag": ({"structural_tag": {"triggers": []}}, "send tools, or a grammar in Lark"),
    "as response_format": (form("structural_tag", structures=[]), "'structural_tag' is not supp"),
    "no GBNF": ({"grammar": 'root ::= "yes'}, "grammar is no GBNF grammar (Unexpected end"),
    "a rule that is not there": ({"grammar": "root ::= b"}, "grammar is no GBNF grammar ("),
    "deep GBNF": ({"ebnf": "root ::= " + "(" * 9_999}, "ebnf is no GBNF grammar (maximum recurs"),
    "long GBNF": ({"ebnf": "root ::= " + "a" * 300_000}, "ebnf has 300,009 characters"),
    "no regex": ({"guided_regex": "(?=a)b"}, "is not supported 1 | start: /(?=a)b/ ^): correct it"),
    "no choice": ({"guided_choice": []}, "guided_choice has 0 texts"),
    "numbers inside": ({"structured_outputs": {"choice": [1]}}, "is not a list of texts"),
    "many choices": ({"guided_choice": ["a"] * 10_001}, "has 10,001 texts"),
    "a choice of numbers": ({"guided_choice": [1]}, "guided_choice[0] is not a text"),
    "a number as regex": ({"structured_outputs": {"regex": 5}}, "regex has no text"),
    "no schema": ({"guided_json": "{"}, "guided_json has no schema"),
    "Ollama's": ({"format": "json"}, "format is not a field: did you mean response_format?"),
}
# Schemas that are followed, and words of refusals of others.
SCHEMAS: dict[str, tuple[Any, str]] = {
    "enum behind $ref": ({"$ref": "#/$defs/E", "$defs": {"E": {"enum": ["Ann", 1, None]}}}, ""),
    "oneOf told apart": (
        {"oneOf": [{"const": "dog"}, {"type": "object", "properties": {"k": {"const": "cat"}}}]},
        "",
    ),
    "oneOf of kinds": ({"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]}, ""),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        "oneOf constraints are not supported",
    ),
    "nullable": ({"type": ["string", "null"], "format": "date"}, ""),
    "draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": "Q",
            "allOf": [{"$ref": "#/definitions/P"}],
            "definitions": {"P": {"type": "number", "exclusiveMaximum": 1, "default": 0.5}},
        },
        "",
    ),
    "recursive": (
        {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}},
        "",
    ),
    "uuid": ({"type": "string", "format": "uuid"}, ""),
    "any": ({}, ""),
    "a format nobody knows": ({"type": "string", "format": "phone"}, "Unknown format: phone"),
    "look-ahead": ({"type": "string", "pattern": "^(?!x)[a-z]$"}, "look-ahead"),
    "not": ({"not": {"type": "null"}}, '["not"]'),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "what cannot be": (
        {"type": "object", "required": ["zz"], "additionalProperties": False},
        "'zz' is unsatisfiable",
    ),
}


def sent(path: str, **given: Any) -> dict[str, Any]:
    """A request's body."""
    text: Any = said("Which?") if path == CHAT else "Which?"
    longest = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {PATHS[path]: text, longest: 60, **given}


def answered(server: Server, path: str, **given: Any) -> str:
    made = server.http.post(path, json=sent(path, **given))
    assert made.status_code == 200, made.text
    if path == "/v1/responses":
        return str(made.json()["output"][0]["content"][0]["text"])
    choice = made.json()["choices"][0]
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])


@pytest.mark.parametrize("name", GUIDED)
def test_fields_of_other_servers_are_followed(server: Server, name: str) -> None:
    given, like = GUIDED[name]
    for path in PATHS:
        assert re.fullmatch(like, answered(server, path, **given)), path


@pytest.mark.parametrize("name", FORMATS)
def test_response_formats_are_followed_however_they_are_written(server: Server, name: str) -> None:
    given, like = FORMATS[name]
    assert re.fullmatch(like, answered(server, CHAT, **given))


def test_what_is_empty_asks_for_nothing(server: Server) -> None:
    usual = answered(server, CHAT)
    empty = {
        **dict.fromkeys(["grammar", "ebnf", "regex", "guided_regex", "guided_grammar"], ""),
        **dict.fromkeys(["guided_json", "json_schema", "guided_choice", "format"]),
        "structured_outputs": {"json": None, "regex": "", "json_object": False},
        "response_format": None,
    }
    assert answered(server, CHAT, **empty) == usual
    assert answered(server, CHAT, **form("json_object", schema={}))[0] == "{"
    assert answered(server, CHAT, structured_outputs={"json_object": True})[0] == "{"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_its_field(server: Server, name: str) -> None:
    given, words = REFUSED[name]
    for path in (CHAT, "/v1/completions"):
        error = require_error(server.http.post(path, json=sent(path, **given)), 400, words)
        assert error["param"] in {*given, "response_format"}


def test_tools_go_with_json_alone(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    given: dict[str, Any] = {"guided_regex": "ab", "tools": [tool]}
    made = server.http.post(CHAT, json=sent(CHAT, **given))
    require_error(made, 400, "guided_regex does not go with tools")
    assert answered(server, CHAT, **given, tool_choice="none") == "ab"
    assert answered(server, CHAT, tools=[tool], **form("json_object"))[0] == "{"


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_followed_or_refused_by_what_is_wrong(server: Server, name: str) -> None:
    schema, words = SCHEMAS[name]
    given = {"max_tokens": 2, **form("json_schema", json_schema={"name": "x", "schema": schema})}
    made = server.http.post(CHAT, json=sent(CHAT, **given))
    if words:
        require_error(made, 400, words)
    else:
        assert made.status_code == 200, made.text


def test_what_refers_without_end_does_not_end_the_server(server: Server) -> None:
    """Each of these ended the process, at the latest when its answer began."""
    count = 4000
    rules = "\n".join(f"r{at} ::= r{at + 1}" for at in range(1, count))
    gbnf = f'root ::= r1\n{rules}\nr{count} ::= "a"\n'
    lark = gbnf.replace(" ::=", ":").replace("root", "start")
    steps: dict[str, Any] = {
        f"d{at}": {"items": {"$ref": f"#/$defs/d{at + 1}"}, "type": "array"} for at in range(count)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{count}": {"type": "null"}}}
    for given in ({"grammar": gbnf}, {"guided_grammar": lark}):
        assert answered(server, CHAT, **given) == "a"
    assert answered(server, CHAT, guided_json=schema, max_tokens=2)[0] == "["


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "\ud800("},
        {"guided_choice": ["\ud800"]},
        {"grammar": 'root ::= "\ud800'},
        {"guided_grammar": 'start: "\ud800"'},
        {"guided_json": {"const": "\ud800"}},
        form("\ud800"),
    ],
    ids=str,
)
def test_half_a_character_cannot_be_followed(server: Server, given: dict[str, Any]) -> None:
    content = json.dumps(sent(CHAT, **given)).encode()
    require_error(server.http.post(CHAT, content=content), 400, next(iter(given)))
