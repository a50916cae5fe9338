"""Answers with tools of odd names and schemas, in any pieces, and cut anywhere."""

import json
import random
from typing import Any

import pytest

from kvlite.conversation.runner import Runner
from kvlite.engine.grammar import Grammar
from kvlite.errors import SettingError
from kvlite.model.answers.form import ID, AnswerForm, CallForm, Tool
from kvlite.model.answers.grammar import answer_grammar
from kvlite.model.answers.parameter_arguments import ParameterArguments
from kvlite.model.answers.reader import AnswerReader
from kvlite.model.grammar import Vocabulary
from tests.test_answers import CALLS, TOOLS, all_forms, gathered
from tests.written_calls import written


@pytest.fixture(scope="module")
def forms(smollm: Runner) -> dict[str, tuple[Any, AnswerForm, Vocabulary]]:
    return all_forms(smollm)


def test_a_name_may_begin_like_another(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]],
) -> None:
    tools = [Tool("get"), Tool("get_weather"), Tool("t.x/y")]
    for _, form, _ in forms.values():
        assert form.calls is not None
        for name in ("get", "get_weather", "t.x/y", "get_other"):
            answer = written(form.calls, [(name, {})]).replace(ID, "abcdefgh1")
            for size in (1, 3, 1000):
                reader = AnswerReader(form, tools)
                pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
                parts = [part for each in pieces for part in reader.push(each)] + reader.flush()
                is_text = form.calls.trigger == "" and name == "get_other"
                assert is_text or gathered(parts) == ("", "", [(name, {})]), (form, name, size)


def test_what_is_read_is_the_same_in_any_pieces(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]],
) -> None:
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
                pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
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
            "x": {"type": "object"},
            "loop": {"$ref": "#/properties/loop"},
        },
        "$defs": {"n": {"type": "integer"}, "o": {"type": "object"}},
    }
    told = {"n": "3", "o": '{"a": 1}', "c": "5", "s": '"a"', "i>j": "4", "e": "1", "x": "{1, 2}"}
    told["loop"] = "NaN"
    answer = "".join(f"<p={key}>\n{value}</p>\n" for key, value in told.items()) + "</f>"
    for size in (1, 3, 1000):
        reader = arguments.reader(schema, ["</f>"])
        made = "".join(reader.push(answer[at : at + size])[0] for at in range(0, len(answer), size))
        wanted = {"n": 3, "o": {"a": 1}, "c": 5, "s": '"a"', "i>j": 4, "e": 1, "x": "{1, 2}"}
        assert json.loads(made) == wanted | {"loop": "NaN"}


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
def test_odd_schemas_are_enforced_or_left(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]], odd: str
) -> None:
    schema, right, wrong = ODD[odd]
    tool = Tool("odd.tool", "", {"additionalProperties": False, **schema})
    for name, (tokenizer, form, vocabulary) in forms.items():
        assert form.calls is not None
        rules = answer_grammar(form, tokenizer, vocabulary.trie, [tool], needed=True)

        def goes(arguments: dict[str, Any], form: CallForm = form.calls) -> bool:
            grammar = Grammar(vocabulary, rules)  # noqa: B023
            said = written(form, [(tool.name, arguments)]).replace(ID, "abcdefgh1")
            try:
                for each in tokenizer.encode(said, add_special_tokens=False):  # noqa: B023
                    grammar.take(each)
            except SettingError:
                return False
            return grammar.may_end

        free = odd == "controls" and isinstance(form.calls.arguments, ParameterArguments)
        assert goes({} if free else right), (name, rules)
        assert wrong is None or not goes(wrong), (name, rules)
