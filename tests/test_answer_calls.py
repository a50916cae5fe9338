"""Calls that are hard to tell: by names, by schemas, within reasoning, and how many they are."""

import json
from typing import Any

import pytest

from kvlite.conversation.runner import Runner
from kvlite.engine.grammar import Grammar
from kvlite.errors import SettingError
from kvlite.model.answers.form import ID, AnswerForm, Tool
from kvlite.model.answers.grammar import MOST_CALLS, answer_grammar
from kvlite.model.answers.parameter_arguments import ParameterArguments
from kvlite.model.answers.reader import AnswerReader
from kvlite.model.grammar import Vocabulary
from tests.test_answers import CALLS, TEMPLATES, TOOLS, all_forms, gathered, read
from tests.written_calls import written


@pytest.fixture(scope="module")
def forms(smollm: Runner) -> dict[str, tuple[Any, AnswerForm, Vocabulary]]:
    return all_forms(smollm)


def test_values_are_of_the_types_that_a_reference_names() -> None:
    arguments = ParameterArguments("<p=", ">", ">", "</p>")
    place = {"properties": {"city": {"type": "string"}}}
    schema = {
        "properties": {
            "o": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "r": {"$ref": "#/$defs/Place"},
            "a": {"items": {"type": "integer"}},
            "c": {"const": 5},
            "self": {"$ref": "#/$defs/Loop"},
        },
        "$defs": {"Place": place, "Loop": {"$ref": "#/$defs/Loop"}},
    }
    told = {"o": '{"city": "Bonn"}', "r": '{"city": "Bonn"}', "a": "[1]", "c": "5", "self": "1"}
    answer = "".join(f"<p={key}>{value}</p>" for key, value in told.items())
    made, _ = arguments.reader(schema, ["</f>"]).push(f"{answer}</f>")
    city = {"city": "Bonn"}
    assert json.loads(made) == {"o": city, "r": city, "a": [1], "c": 5, "self": "1"}


_NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("name", ["parameters", "pairs"])
@pytest.mark.parametrize("value", ["Bad Homburg", None, 'say "so"'])
def test_strings_that_may_be_null_are_written_without_quotes(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]], name: str, value: str | None
) -> None:
    """As templates write them: a grammar that wants quotes would have them in the value."""
    tokenizer, form, vocabulary = forms[name]
    assert form.calls is not None
    tool = Tool("weather", "", {"properties": {"place": _NULLABLE}, "required": ["place"]})
    grammar = Grammar(
        vocabulary, answer_grammar(form, tokenizer, vocabulary.trie, [tool], needed=True)
    )
    answer = written(form.calls, [("weather", {"place": value})])
    for each in tokenizer.encode(answer, add_special_tokens=False):
        grammar.take(each)
    assert grammar.may_end
    reader = AnswerReader(form, [tool])
    assert gathered([*reader.push(answer), *reader.flush()])[2] == [("weather", {"place": value})]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tool_whose_name_begins_with_that_of_another_is_called_by_its_own(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]], name: str
) -> None:
    _, form, _ = forms[name]
    assert form.calls is not None
    tools = [Tool("read"), Tool("read_file"), Tool("read_file_2")]
    for tool in tools:
        reader = AnswerReader(form, tools)
        answer = written(form.calls, [(tool.name, {})]).replace(ID, "abcdefgh1")
        parts = [part for each in answer for part in reader.push(each)] + reader.flush()
        assert gathered(parts) == ("", "", [(tool.name, {})])


def test_a_call_ends_reasoning_and_one_that_only_looks_so_does_not(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]],
) -> None:
    tokenizer, form, vocabulary = forms["hermes"]
    assert form.calls is not None
    call = written(form.calls, CALLS[:1])
    thought = "<think>\nI <tool_call> it <tool_call>.\n"
    for size in (1, 3, 1000):
        whole = f"{thought}{call}"
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert read(form, pieces) == ("", "I <tool_call> it <tool_call>.", CALLS[:1])
        pieces = [thought[at : at + size] for at in range(0, len(thought), size)]
        assert read(form, pieces) == ("", "I <tool_call> it <tool_call>.", [])
    rules = answer_grammar(form, tokenizer, vocabulary.trie, TOOLS, needed=True)
    grammar = Grammar(vocabulary, rules)
    with pytest.raises(SettingError):
        for each in tokenizer.encode(f"<think>\nI {call}", add_special_tokens=False):
            grammar.take(each)


def test_calls_of_an_answer_are_bounded(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]],
) -> None:
    tokenizer, form, vocabulary = forms["hermes"]
    assert form.calls is not None
    rules = answer_grammar(form, tokenizer, vocabulary.trie, TOOLS, needed=True)
    for count in (MOST_CALLS, MOST_CALLS + 1):
        grammar = Grammar(vocabulary, rules)
        answer = written(form.calls, CALLS[1:] * count)
        ids = tokenizer.encode(answer, add_special_tokens=False)
        if count > MOST_CALLS:
            with pytest.raises(SettingError):
                [grammar.take(each) for each in ids]
        else:
            [grammar.take(each) for each in ids]
            assert grammar.may_end
