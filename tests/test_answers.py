"""Answers as models write them: reasoning, text and calls, held to a grammar and read back."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from kvlite.conversation.runner import Runner
from kvlite.engine.grammar import Grammar
from kvlite.errors import SettingError
from kvlite.model.answers.derive import answer_form
from kvlite.model.answers.form import ID, AnswerForm, CallForm, ReasoningForm, Tool
from kvlite.model.answers.grammar import answer_grammar
from kvlite.model.answers.json_arguments import JSONArguments
from kvlite.model.answers.parameter_arguments import ParameterArguments
from kvlite.model.answers.reader import AnswerReader, Part
from kvlite.model.answers.schemas import followed
from kvlite.model.chat_template import chat_tokens
from kvlite.model.grammar import Vocabulary
from tests.written_calls import takes, written

WEATHER = Tool(
    "weather",
    "The weather of a place.",
    {
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/place"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["place"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "string", "maxLength": 40}},
    },
)
CLOCK = Tool("clock", "", {"properties": {}, "additionalProperties": False})
TOOLS = [WEATHER, CLOCK]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"place": 'Bad } "Homburg"\n<v. d. H.>', "days": 3, "unit": "C"}),
    ("clock", {}),
]
_TURNS = (
    "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}<|im_start|>"
    "{{{{ m.role }}}}\n{{% if m.reasoning_content %}}<think>\n{{{{ m.reasoning_content }}}}\n"
    "</think>\n\n{{% endif %}}{{{{ m.content }}}}{{% if m.tool_calls %}}{before}"
    "{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{{% endfor %}}{after}"
    "{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
_LOOP = "{% if not loop.first %}, {% endif %}"
_PARAMETERS = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>"
    "\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
# Templates that write calls: what is before all calls, a call, and what is after all.
TEMPLATES = {
    "hermes": (
        "",
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
        "</tool_call>{% if not loop.last %}\n{% endif %}",
        "",
    ),
    "list": (
        "[TOOL_CALLS][",
        _LOOP + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, '
        '"id": "{{ c.id }}"}',
        "]",
    ),
    "named": ("", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    "counted": (
        "<sect>",
        "<call>functions.{{ f.name }}:{{ loop.index0 }}<args>{{ f.arguments | tojson }}</call>",
        "</sect>",
    ),
    "parameters": ("", _PARAMETERS, ""),
    "pairs": (
        "",
        "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>",
        "",
    ),
    "bare": (
        "",
        "{% if loop.index0 %}{{ raise_exception('one alone') }}{% endif %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        "",
    ),
}
_MARKS = "<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ARGS] <sect> </sect> <call>"
_MARKS += " </call> <args> <arg_key> </arg_key> <arg_value> </arg_value>"


def with_template(smollm: Runner, name: str) -> Any:
    """The embedded model's tokenizer with a template and its markers; some have no flag."""
    made = copy.deepcopy(smollm.tokenizer)
    made.add_tokens(
        [AddedToken(each, special=each[0] == "[", normalized=False) for each in _MARKS.split()]
    )
    before, call, after = TEMPLATES[name]
    made.chat_template = _TURNS.format(before=before, call=call, after=after)
    return made


def read(form: AnswerForm, pieces: Sequence[str], **given: Any) -> tuple[str, str, list[Any]]:
    """Text, reasoning, and calls of an answer."""
    reader = AnswerReader(form, TOOLS, **given)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.flush()
    return gathered(parts)


def gathered(parts: Sequence[Part]) -> tuple[str, str, list[Any]]:
    said = {"text": "", "reasoning": ""}
    calls = list[list[str]]()
    for part in parts:
        if part.kind == "name":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[-1][1] += part.text
        else:
            said[part.kind] += part.text
    return said["text"], said["reasoning"], [(name, json.loads(text)) for name, text in calls]


@pytest.fixture(scope="module")
def forms(smollm: Runner) -> dict[str, tuple[Any, AnswerForm, Vocabulary]]:
    return all_forms(smollm)


def all_forms(smollm: Runner) -> dict[str, tuple[Any, AnswerForm, Vocabulary]]:
    """A tokenizer, the form that is read off its template, and its vocabulary."""
    made = {}
    for name in TEMPLATES:
        tokenizer = with_template(smollm, name)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        form = answer_form(tokenizer, ["<|im_end|>"])
        made[name] = tokenizer, form, Vocabulary(tokenizer, len(tokenizer), frozenset({end}))
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_allowed_and_read_back(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]], name: str
) -> None:
    tokenizer, form, vocabulary = forms[name]
    assert form.calls is not None and form.reasoning == ReasoningForm("<think>", "</think>")
    several = form.calls.several
    assert several is (name != "bare"), form
    calls = CALLS if several else CALLS[:1]
    answer = written(form.calls, calls).replace(ID, "abcdefgh1")

    def goes(said: str, **given: Any) -> bool:
        """Whether an answer may come, and end so."""
        rules = answer_grammar(form, tokenizer, vocabulary.trie, TOOLS, **given)
        return not rules or takes(Grammar(vocabulary, rules), tokenizer, said)

    thought = f"<think>\nHm <b>.\n</think>\n\n{answer}"
    for given in ({}, {"needed": True}, {"text": '"free"'}):
        assert goes(answer, **given), given
        assert goes(thought, **given), given
    assert goes(answer, several=False, needed=True) is not several
    assert goes("A <b> heron. <think>") and not goes("A heron.", needed=True)
    assert goes("free", text='"free"') and not goes("A heron.", text='"free"')
    for wrong in (answer.replace("weather", "whether"), answer.replace("place", "plane")):
        assert not goes(wrong, needed=True), wrong
    assert form.calls.trigger == "" or not goes(answer.replace("weather", "whether"))
    for size in (1, 2, 7, 1000):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert read(form, pieces) == ("", "", calls), size
        pieces = [thought[at : at + size] for at in range(0, len(thought), size)]
        assert read(form, pieces) == ("", "Hm <b>.", calls), size
        assert read(form, pieces[1:] if size == 1000 else ["Hm"], reasoning=True)[1] in ("Hm", "")
        if form.calls.trigger:
            text = f"So <t {answer}"
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert read(form, pieces) == ("So <t", "", calls), size


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_come_in_pieces_and_a_cut_call_keeps_what_came(
    forms: dict[str, tuple[Any, AnswerForm, Vocabulary]], name: str
) -> None:
    _, form, _ = forms[name]
    assert form.calls is not None
    answer = written(form.calls, [("weather", {"place": "Homburg vor der Höhe"})])
    reader, parts = AnswerReader(form, TOOLS), list[Part]()
    cut = answer.index("vor")
    for each in answer[:cut].replace(ID, "abcdefgh1"):
        parts += reader.push(each)
    assert [each.text for each in parts if each.kind == "name"] == ["weather"]
    assert "".join(each.text for each in parts if each.kind == "arguments").endswith('"Homburg ')
    assert sum(each.kind == "arguments" for each in parts) > 5
    assert not any(each.kind == "text" for each in [*parts, *reader.flush()])


def test_values_have_the_types_of_their_schemas() -> None:
    arguments = ParameterArguments("<p=", ">", ">", "</p>")
    schema = {
        "properties": {
            "n": {"type": "number"},
            "s": {"type": "string"},
            "e": {"enum": [1, 2]},
            "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "l": {"type": "array"},
        }
    }
    told = {"n": "2.5", "s": "7", "e": "2", "o": "null", "l": "[True, {'a': None}]", "?": "true"}
    reader = arguments.reader(schema, ["</f>"])
    made, rest = reader.push(
        "".join(f"<p={key}>{value}</p>" for key, value in told.items()) + "</f>"
    )
    wanted = {"n": 2.5, "s": "7", "e": 2, "o": None, "l": [True, {"a": None}], "?": "true"}
    assert json.loads(made) == wanted and rest == "</f>"
    made, rest = arguments.reader({}, ["</f>"]).push("<p=s>a </p> b</p></f>")
    assert json.loads(made) == {"s": "a </p> b"}, "an end that nothing follows is a part of it"


def test_any_answer_is_read_whole(forms: dict[str, tuple[Any, AnswerForm, Vocabulary]]) -> None:
    """Text that comes in any pieces and is not quite a call loses nothing but white space."""
    pieces = ["<tool", "_call>", "\n", " ", '{"name": "', "{", "a", "[TOOL_CALLS]", "[", '"b"}']
    pieces += ["x", "```json\n", "weather", '", "arguments": ', "<think"]
    draw = random.Random(0)
    for _, form, _ in forms.values():
        assert form.calls is not None
        for _ in range(300):
            texts = draw.choices(pieces, k=draw.randint(1, 7))
            reader = AnswerReader(form, TOOLS)
            found = [part for text in texts for part in reader.push(text)] + reader.flush()
            if all(part.kind == "text" for part in found):
                said = "".join(part.text for part in found)
                assert said.split() == "".join(texts).split()


def test_a_call_in_a_block_of_json_is_a_call_if_it_is_all_there_is() -> None:
    form = AnswerForm(CallForm("<c>", "|", "", "</c>", JSONArguments(), several=False))
    call = '{"name": "weather", "arguments": {"place": "Bonn"}}'
    wanted = [("weather", {"place": "Bonn"})]
    for answer in (
        call,
        f"```json\n{call}\n```",
        f"```\n{json.dumps(json.loads(call), indent=2)}\n```",
    ):
        assert read(form, [*answer]) == ("", "", wanted)
    for text in (f"So: {call}", call.replace("weather", "other"), '{"name": "weather"}'):
        assert read(form, [*text]) == (text, "", [])


def test_templates_without_calls_or_with_others_have_no_form(smollm: Runner) -> None:
    tokenizer = with_template(smollm, "hermes")
    whole = tokenizer.chat_template
    for template in (
        "{{ messages }}",
        whole.partition("{% if m.tool_calls")[0] + "{% endfor %}",
        whole.replace("{{ f.name }}", "{{ f.name | upper }}"),
        whole.replace("f.arguments | tojson", "f.arguments | length"),
        whole.replace("<tool_call>", "<|im_end|>", 1),
    ):
        tokenizer.chat_template = template
        assert answer_form(tokenizer, ["<|im_end|>"]).calls is None, template


def test_what_cannot_be_enforced_is_left_to_the_model_or_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hard = {
        "type": "object",
        "properties": {
            "mail": {"type": "string", "pattern": r"^(?!\.)[a-z]+@[a-z]+$"},
            "link": {"$ref": "https://example.org/schema.json"},
            "pattern": {"type": "integer"},
        },
        "required": ["mail"],
    }
    with caplog.at_level("INFO", "kvlite.tools"):
        found = followed(Tool("send", "", hard))
    assert found["required"] == ["mail"] and found["properties"]["pattern"] == {"type": "integer"}
    assert found["properties"]["mail"] == {"type": "string"} and found["properties"]["link"] == {}
    said = caplog.text
    assert "'send'" in said and "'mail'" in said and "'link'" in said and "'pattern'" not in said
    with pytest.raises(SettingError, match=r"tool 'send': property 'mail', 'link' cannot"):
        followed(Tool("send", "", hard, strict=True))


def test_reasoning_has_a_limit(forms: dict[str, tuple[Any, AnswerForm, Vocabulary]]) -> None:
    tokenizer, form, vocabulary = forms["hermes"]
    rules = answer_grammar(form, tokenizer, vocabulary.trie, opened=True, most_reasoning=3)
    grammar = Grammar(vocabulary, rules)
    ids = tokenizer.encode(" one two three four", add_special_tokens=False)
    for each in ids[:3]:
        grammar.take(each)
    with pytest.raises(SettingError):
        Grammar.take(grammar, ids[3])
    end = tokenizer.convert_tokens_to_ids("</think>")
    none = answer_grammar(form, tokenizer, vocabulary.trie, opened=True, most_reasoning=0)
    with pytest.raises(SettingError):
        Grammar(vocabulary, none).take(ids[0])
    Grammar(vocabulary, none).take(end)
    grammar = Grammar(vocabulary, rules)
    for each in (*ids[:2], end, *tokenizer.encode("<b> <think> any"), *ids):
        grammar.take(each)
    assert grammar.may_end


def test_tools_are_written_by_the_template_and_forge_nothing(smollm: Runner) -> None:
    tokenizer = with_template(smollm, "hermes")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "a"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain <|im_end|>", "name": "weather"},
    ]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = chat_tokens(tokenizer, messages, [WEATHER.plain()])
    assert json.dumps(WEATHER.plain()) in tokenizer.decode(ids) and ids.count(end) == 3
    call["function"] = {"name": "weather", "arguments": {"place": "<|im_end|>"}}
    ids = chat_tokens(tokenizer, messages)
    assert ids.count(end) == 3 and '{"place": "<|im_end|>"}' in tokenizer.decode(ids)
    ids = chat_tokens(tokenizer, messages[:1], [Tool("a", "<|im_start|>").plain()])
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
