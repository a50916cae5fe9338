"""Calls that are hard to tell: by names, by schemas, within reasoning, in any pieces, cut anywhere,
and how many they are."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvlite.engine.grammar import Grammar
from kvlite.model.answers.form import ID, AnswerForm, Tool
from kvlite.model.answers.grammar import MOST_CALLS, answer_grammar
from kvlite.model.answers.parameter_arguments import ParameterArguments
from kvlite.model.answers.reader import AnswerReader
from kvlite.model.grammar import Vocabulary
from tests.families import FAMILIES
from tests.test_answers import CALLS, TOOLS, all_forms, gathered, read
from tests.written_calls import takes, written

Forms = dict[str, tuple[Any, AnswerForm, Vocabulary]]


@pytest.fixture(scope="module")
def forms() -> Forms:
    return all_forms(SimpleNamespace(tokenizer=FAMILIES["smollm2"].tokenizer()))  # type: ignore[arg-type]


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def held_to(form: tuple[Any, AnswerForm, Vocabulary], tools: list[Tool], answer: str) -> bool:
    """Whether the grammar of an answer takes it, whole."""
    tokenizer, own, vocabulary = form
    rules = answer_grammar(own, tokenizer, vocabulary.trie, tools, needed=True)
    return takes(Grammar(vocabulary, rules), tokenizer, answer)


def test_a_tool_whose_name_begins_with_that_of_another_is_called_by_its_own(forms: Forms) -> None:
    tools = [Tool("read"), Tool("read_file"), Tool("read_file_2"), Tool("t.x/y")]
    for _, form, _ in forms.values():
        assert form.calls is not None
        for name in (*(tool.name for tool in tools), "read_other"):
            answer = written(form.calls, [(name, {})]).replace(ID, "abcdefgh1")
            for size in (1, 3, 1000):
                reader = AnswerReader(form, tools)
                pieces = pieces_of(answer, size)
                parts = [part for each in pieces for part in reader.push(each)] + reader.flush()
                is_text = form.calls.trigger == "" and name == "read_other"
                assert is_text or gathered(parts) == ("", "", [(name, {})]), (form, name, size)


@pytest.mark.parametrize("name", ["parameters", "pairs"])
@pytest.mark.parametrize("value", ["Bad Homburg", None, 'say "so"'])
def test_strings_that_may_be_null_are_written_without_quotes(
    forms: Forms, name: str, value: str | None
) -> None:
    """As templates write them: a grammar that wants quotes would have them in the value."""
    form = forms[name][1]
    assert form.calls is not None
    nullable = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    tool = Tool("weather", "", {"properties": {"place": nullable}, "required": ["place"]})
    answer = written(form.calls, [("weather", {"place": value})])
    assert held_to(forms[name], [tool], answer)
    reader = AnswerReader(form, [tool])
    assert gathered([*reader.push(answer), *reader.flush()])[2] == [("weather", {"place": value})]


def test_a_call_ends_reasoning_and_one_that_only_looks_so_does_not(forms: Forms) -> None:
    form = forms["hermes"][1]
    assert form.calls is not None
    call = written(form.calls, CALLS[:1])
    thought = "<think>\nI <tool_call> it <tool_call>.\n"
    for size in (1, 3, 1000):
        told = "I <tool_call> it <tool_call>."
        assert read(form, pieces_of(f"{thought}{call}", size)) == ("", told, CALLS[:1])
        assert read(form, pieces_of(thought, size)) == ("", told, [])
    assert not held_to(forms["hermes"], TOOLS, f"<think>\nI {call}")


def test_calls_of_an_answer_are_bounded(forms: Forms) -> None:
    form = forms["hermes"][1]
    assert form.calls is not None
    for count in (MOST_CALLS, MOST_CALLS + 1):
        answer = written(form.calls, CALLS[1:] * count)
        assert held_to(forms["hermes"], TOOLS, answer) == (count == MOST_CALLS)


def test_what_is_read_is_the_same_in_any_pieces(forms: Forms) -> None:
    draw = random.Random(0)
    for _, form, _ in forms.values():
        assert form.calls is not None and form.reasoning is not None
        for _ in range(60):
            texts = [
                draw.choice(["So: ", "<", "{", "<think>", "<think>\nHm\n</think>", "\n"]),
                written(form.calls, draw.choices(CALLS, k=1 + form.calls.several)),
                draw.choice(["", "more", written(form.calls, CALLS[:1])]),
            ]
            answer = "".join(texts).replace(ID, "abcdefgh1")
            answer = answer[: draw.randint(0, 2 * len(answer))]
            found = []
            for size in (1, 2, 5, 1000):
                reader = AnswerReader(form, TOOLS)
                pieces = pieces_of(answer, size)
                parts = [part for each in pieces for part in reader.push(each)] + reader.flush()
                kinds = dict.fromkeys(("text", "reasoning", "name", "arguments"), "")
                for each in parts:
                    kinds[each.kind] += "".join(each.text.split())
                found.append(kinds)
            assert all(each == found[0] for each in found), (answer, found)


def test_values_are_of_the_types_that_a_schema_refers_to() -> None:
    arguments = ParameterArguments("<p=", ">\n", ">\n", "\n</p>\n")
    schema = {
        "properties": {
            "n": {"$ref": "#/$defs/n"},
            "o": {"allOf": [{"$ref": "#/$defs/o"}]},
            "c": {"const": 5},
            "s": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "i>j": {"$ref": "#/properties/n"},
            "e": {"enum": ["a", 1]},
            "l": {"items": {"type": "integer"}},
            "p": {"anyOf": [{"$ref": "#/$defs/o"}, {"type": "null"}]},
            "x": {"type": "object"},
            "loop": {"$ref": "#/properties/loop"},
        },
        "$defs": {"n": {"type": "integer"}, "o": {"type": "object"}},
    }
    told = {"n": "3", "o": '{"a": 1}', "c": "5", "s": '"a"', "i>j": "4", "e": "1", "x": "{1, 2}"}
    told |= {"l": "[1]", "p": '{"city": "Bonn"}'}
    told["loop"] = "NaN"
    answer = "".join(f"<p={key}>\n{value}</p>\n" for key, value in told.items()) + "</f>"
    for size in (1, 3, 1000):
        reader = arguments.reader(schema, ["</f>"])
        made = "".join(reader.push(answer[at : at + size])[0] for at in range(0, len(answer), size))
        wanted = {"n": 3, "o": {"a": 1}, "c": 5, "s": '"a"', "i>j": 4, "e": 1, "x": "{1, 2}"}
        wanted |= {"l": [1], "p": {"city": "Bonn"}, "loop": "NaN"}
        assert json.loads(made) == wanted


ODD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "reference": (
        {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}},
        {"p": 3},
        {"p": "three"},
    ),
    "recursion": (
        {"properties": {"v": {"type": "integer"}, "kid": {"$ref": "#"}}},
        {"v": 1, "kid": {"v": 2, "kid": {"v": 3}}},
        {"v": 1, "kid": [1]},
    ),
    "null": ({"properties": {"s": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
             {"s": "a"}, None),
    "numbers": ({"properties": {"e": {"enum": [1, "a", None]}}}, {"e": "a"}, {"e": "b"}),
    "required": ({"required": ["z"], "additionalProperties": True}, {"z": "a"}, {}),
    "address": (
        {"$schema": "no address", "properties": {"n": {"type": "integer"}}}, {"n": 1}, {"n": []},
    ),
    "names": (
        {"properties": {'a"b': {"type": "integer"}, "c\nd": {"type": "integer"}, "é<": {}}},
        {'a"b': 1, "c\nd": 2, "é<": "x"},
        None,
    ),
    "controls": (
        {"properties": {"e": {"enum": ["<|im_end|>", "</think>"]}, "<think>": {}}},
        {"e": "b"},
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_schemas_are_enforced_or_left(forms: Forms, odd: str) -> None:
    schema, right, wrong = ODD[odd]
    tool = Tool("odd.tool", "", {"additionalProperties": False, **schema})
    for name, form in forms.items():
        calls = form[1].calls
        assert calls is not None
        free = odd == "controls" and isinstance(calls.arguments, ParameterArguments)
        for given, is_right in (({} if free else right, True), (wrong, False)):
            if given is not None:
                said = written(calls, [(tool.name, given)]).replace(ID, "abcdefgh1")
                assert held_to(form, [tool], said) == is_right, name
