"""Calls of tools, as Hermes and Qwen, Mistral and Llama 3 write them: held to and read back."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from kvlite.conversation.runner import Runner
from kvlite.engine.grammar import Grammar
from kvlite.errors import SettingError
from kvlite.model.chat_template import chat_tokens
from kvlite.model.grammar import Vocabulary
from kvlite.model.tool_calls import (
    Call,
    CallReader,
    Tool,
    ToolForm,
    calls_grammar,
    tool_form,
)

WEATHER = Tool(
    "weather",
    "The weather of a place.",
    {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer"}},
        "required": ["place"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "string", "maxLength": 40, "not": {"const": "x"}}},
    },
)
CLOCK = Tool("clock", "", {"properties": {}, "additionalProperties": False})
PLACE, TIME = '{"place": "Bad } \\"Homburg\\""}', "{}"
# What templates show, by form, and an answer with two calls (Llama 3 has one).
FORMS = {
    "hermes": (
        "{{ tools }}<tool_call></tool_call>",
        f'<tool_call>\n{{"name": "weather", "arguments": {PLACE}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "clock", "arguments": {TIME}}}\n</tool_call>',
    ),
    "mistral": (
        "{{ tools }}[TOOL_CALLS]",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {PLACE}}}, '
        f'{{"name": "clock", "arguments": {TIME}}}]',
    ),
    "mistral, newer": (
        "{{ tools }}[TOOL_CALLS][ARGS]",
        f"[TOOL_CALLS]weather[ARGS]{PLACE}[TOOL_CALLS]clock[ARGS]{TIME}",
    ),
    "llama": (
        '{{ tools }}{{ tool_calls }}{"name": function name, "parameters": {}}',
        f'{{"name": "weather", "parameters": {PLACE}}}',
    ),
}


@pytest.fixture(scope="module")
def tokenizer(smollm: Runner) -> Any:
    """The embedded model's, two of its special tokens spelled as Mistral's."""
    import copy

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    text = smollm.tokenizer.backend_tokenizer.to_str()
    for ours, theirs in (("<file_sep>", "[TOOL_CALLS]"), ("<filename>", "[ARGS]")):
        assert ours in text
        text = text.replace(ours, theirs)
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text))
    made.eos_token = smollm.tokenizer.eos_token
    return copy.copy(made)


def read(tokenizer: Any, form: ToolForm, ids: Sequence[int]) -> tuple[str, list[Call]]:
    """All that a reader makes of an answer."""
    reader = CallReader(form, tokenizer)
    texts = [tokenizer.decode([each], skip_special_tokens=True) for each in ids]
    found = [reader.push(each, text) for each, text in zip(ids, texts, strict=True)]
    found.append(reader.flush())
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer, 49_152, frozenset({tokenizer.eos_token_id}))


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_allowed_and_read_back_and_nothing_else_is(
    tokenizer: Any, vocabulary: Vocabulary, name: str
) -> None:
    template, answer = FORMS[name]
    tokenizer.chat_template = template
    form = tool_form(tokenizer)
    assert form is not None and form.several is (name != "llama")
    end = tokenizer.eos_token_id

    def ends(answer: str, **given: Any) -> bool:
        """Whether an answer may come, and end so."""
        grammar = Grammar(vocabulary, calls_grammar(form, [WEATHER, CLOCK], tokenizer, **given))
        try:
            for each in tokenizer.encode(answer, add_special_tokens=False):
                grammar.take(each)
            grammar.take(end)
        except SettingError:
            return None
        return True

    calls = [Call("weather", PLACE), Call("clock", TIME)][: 1 + form.several]
    assert ends(answer) and ends(answer, needed=True) and ends(answer, text='"free"')
    assert ends(answer, several=False) is not form.several
    assert ends("A heron."), "free text is no call"
    assert not ends("A heron.", needed=True) and not ends("A heron.", text='"free"')
    assert ends("free", text='"free"')
    for wrong in (
        answer.replace("weather", "whether"),
        answer.replace("place", "plane"),
        answer[:-1] if form.marked else answer[:-1] + "]",
        answer.replace('"Homburg', '"' + "H" * 60),
    ):
        assert not ends(wrong), wrong
    ids = tokenizer.encode(answer, add_special_tokens=False)
    place = tokenizer.encode("place", add_special_tokens=False)[0]
    assert read(tokenizer, form, ids) == ("", calls)
    before = tokenizer.encode("So <t", add_special_tokens=False)
    assert read(tokenizer, form, before) == ("So <t", [])
    if form.marked:
        assert read(tokenizer, form, [*before, *ids]) == ("So <t", calls)
    text, cut = read(tokenizer, form, ids[: ids.index(place)])
    assert (text, [each.name for each in cut]) == ("", ["weather"])
    assert PLACE.startswith(cut[0].arguments)


def test_any_answer_is_read_whole(tokenizer: Any) -> None:
    """Text that comes in any pieces and is not quite a call loses nothing but white space."""
    pieces = [
        "<tool",
        "_call>",
        "\n",
        " ",
        '{"name": "',
        "{",
        "a",
        "[TOOL_CALLS]",
        "[",
        '"b"}',
        "x",
    ]
    draw = random.Random(0)
    for template, _ in FORMS.values():
        tokenizer.chat_template = template
        form = tool_form(tokenizer)
        assert form is not None
        for _ in range(300):
            texts = draw.choices(pieces, k=draw.randint(1, 6))
            reader = CallReader(form, tokenizer)
            found = [reader.push(None, text)[0] for text in texts] + [reader.flush()[0]]
            whole = "".join(texts)
            if form.begin + form.head not in whole:
                assert "".join(found).split() == whole.split()


def test_templates_without_tools_or_with_unknown_calls_have_no_form(tokenizer: Any) -> None:
    for template in (
        "{{ messages }}",
        "{{ tools }}",
        "{{ tools }}<tool_call></tool_call><function=",
    ):
        tokenizer.chat_template = template
        assert tool_form(tokenizer) is None


def test_tools_are_written_by_the_template_and_forge_nothing(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "a"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain <|im_end|>", "name": "weather"},
    ]
    ids = chat_tokens(tokenizer, messages, [WEATHER.plain()])
    shown = tokenizer.decode(ids)
    assert json.dumps(WEATHER.plain()) in shown
    assert re.search(
        r'<tool_call>{"name": "weather", "arguments": {"place": "a"}}</tool_call>', shown
    )
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3
    call["function"] = {"name": "weather", "arguments": {"place": "<|im_end|>"}}
    ids = chat_tokens(tokenizer, messages)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3
    assert '{"place": "<|im_end|>"}' in tokenizer.decode(ids)
    ids = chat_tokens(tokenizer, messages[:1], [Tool("a", "<|im_start|>").plain()])
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 1
