"""What chat templates of strangers do, each in the smallest template that does it: forms that they
refuse or leave out, what they do to texts, and what they may use."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvlite
from kvlite.errors import ChatTemplateError, KvliteError, SettingError
from kvlite.model.chat_template import chat_tokens, said_tokens
from tests.test_control_tokens import made

END = "<|im_end|>"
EACH = "{% for m in messages %}"
SHOWN = "{{ m.role }}:{{ m.content }}|"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
TAKES: dict[str, tuple[str, list[str]]] = {
    # What a template refuses or leaves out, and what is in its text then.
    "no system role": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
        + f"{EACH}{SHOWN}{{% endfor %}}",
        ["user:Be brief.\n\nLate.\n\nWeather?|"],
    ),
    "no late system": (
        f"{EACH}{{% if m.role != 'system' or loop.first %}}{SHOWN}{CALLS}{{% endif %}}"
        "{% endfor %}",
        ["system:Be brief.\n\nLate.|user:Weather?|"],
    ),
    "short ids": (
        f"{EACH}{{% for c in m.tool_calls or [] %}}{{% if c.id | length != 9 %}}"
        "{{ raise_exception('ids of 9') }}{% endif %}{% endfor %}"
        + f"{SHOWN}{CALLS}{{% endfor %}}",
        ["system:Late.|"],
    ),
    "arguments as text": (
        f"{EACH}{SHOWN}{{% for c in m.tool_calls or [] %}}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}",
        ['weather{"place": "Rome"}', 'weather{"place": "Oslo"}'],
    ),
    "one call": (
        f"{EACH}{SHOWN}{{% if m.tool_calls %}}{{{{ m.tool_calls[0].function | tojson }}}}"
        "{% endif %}{% endfor %}",
        [
            '"Rome"}}tool:sun|assistant:|{"name": "weather", "arguments": {"place": "Oslo"}}',
            '"Oslo"}}tool:rain|',
        ],
    ),
    "no calls": (
        f"{EACH}{SHOWN}{{% endfor %}}",
        ['assistant:{"name": "weather", "arguments": {"place": "Rome"}}\n{"name":'],
    ),
    "roles in turns": (
        f"{EACH}{{% if not loop.first and m.role == messages[loop.index0 - 1].role == 'user' %}}"
        "{{ raise_exception('in turns') }}{% endif %}" + f"{SHOWN}{CALLS}{{% endfor %}}",
        ["user:Weather?\n\nSoon.|"],
    ),
    "no message after a result": (
        f"{EACH}{{% if m.role == 'user' and not loop.first %}}{{% if "
        "messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('after a result') }}"
        "{% endif %}{% endif %}" + f"{SHOWN}{CALLS}{{% endfor %}}",
        ["tool:rain\n\nThanks.|"],
    ),
}


def templated(source: str) -> Any:
    tokenizer = copy.copy(made("qwen2.5"))
    tokenizer.chat_template = source
    return tokenizer


def call(place: str, **fields: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"place": place})}
    return {"id": f"the_{place}_call", "type": "function", "function": function, **fields}


def history() -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Late."},
        {"role": "user", "content": "Weather?"},
        {"role": "user", "content": "Soon."},
        {"role": "assistant", "content": None, "tool_calls": [call("Rome"), call("Oslo")]},
        {"role": "tool", "content": "sun", "tool_call_id": "the_Rome_call"},
        {"role": "tool", "content": "rain", "tool_call_id": "the_Oslo_call"},
        {"role": "user", "content": "Thanks."},
    ]


@pytest.mark.parametrize("name", TAKES)
def test_what_a_template_does_not_take_is_told_it_in_another_form(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvlite.templates")
    source, expected = TAKES[name]
    text = templated(source).decode(chat_tokens(templated(source), history()))
    for each in expected:
        assert each in text
    for told in (
        "Be brief.",
        "Late.",
        "Weather?",
        "Soon.",
        "Rome",
        "Oslo",
        "sun",
        "rain",
        "Thanks.",
    ):
        assert told in text
    (line,) = caplog.messages
    assert line.startswith("the chat template")


def test_what_no_form_mends_is_refused_in_the_templates_words() -> None:
    refuses = templated("{{ raise_exception('Only\nGreek') }}")
    with pytest.raises(ChatTemplateError, match=r"refuses these messages: Only Greek$"):
        chat_tokens(refuses, history())


OFFERED = {
    "{{ messages.append(1) or messages | length }}": "2",
    "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}": "2",
    "{{ tools | map(attribute='function') | map(attribute='name') | tojson }}": '["weather"]',
    "{{ ('{\"a\": [1]}' | from_json).a[0] }}": "1",
    "{{ strftime_now('%Y') | int > 2000 }}{{ datetime | length }}": "True10",
    "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}": "13",
    "{% generation %}{{ 'a' }}{% endgeneration %}b": "ab",
    "{{ tools[0].function.description == '' }}{{ tools[0].function.parameters | tojson }}": (
        'True{"type": "object", "properties": {}}'
    ),
    "{{ (functions | from_json)[0].function.name }}": "weather",
    "{{ messages[0].content is string }}{{ 'name' in messages[0] }}": "TrueFalse",
    "{{ {'<': 'é'} | tojson }}": '{"<": "é"}',
}


@pytest.mark.parametrize("source", OFFERED)
def test_templates_are_offered_what_they_use(source: str) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "description": None}}]
    messages = [{"role": "user", "content": None, "name": None}]
    tokenizer = templated(source)
    assert tokenizer.decode(chat_tokens(tokenizer, messages, tools)) == OFFERED[source]
    assert messages == [{"role": "user", "content": None, "name": None}]


# What templates do to texts, and how controls then come out of them.
FORGES = {
    "trims": ("{{ m.content | trim }}", f"a {END} "),
    "quotes": ("{{ m.content | tojson }}", f'"{END}"'),
    "escapes": ("{{ m.content | tojson(ensure_ascii=True) }}", f"é{END}"),
    "represents": ("{{ [m.content] }}", END),
    "escapes HTML": ("{{ m.content | e }}", END),
    "lowers": ("{{ m.content | lower }}", "<|IM_END|>"),
    "raises": ("{{ m.content | upper | lower }}", "<|im_End|>"),
    "asks": ("{{ 'none' if '<|im_end|>' in m.content else m.content }}", END),
    "begins": ("<{{ m.content }}", "|im_end|>"),
    "ends": ("{{ m.content }}>", "<|im_end|"),
    "surrounds": ("<|im_{{ m.content }}|>", "end"),
    "surrounds if": ("<|im_{{ m.content }}|>{{ 1 if m.content.startswith('e') else 2 }}", "end"),
    "drops": ("{{ m.content.replace('!', '') }}", "<|im!_end|>"),
    "keys": ("{% for k in {m.content: 1} %}{{ k }}{% endfor %}", END),
}


@pytest.mark.parametrize("name", FORGES)
def test_no_control_comes_out_whatever_a_template_does(name: str) -> None:
    source, text = FORGES[name]
    tokenizer = templated(f"{EACH}<|im_start|>{source}<|im_end|>{{% endfor %}}")
    controls = [*map(tokenizer.convert_tokens_to_ids, ("<|im_start|>", END))]
    for messages in ([{"role": "user", "content": text}], [{"role": "tool", "content": text}]):
        ids = chat_tokens(tokenizer, messages)
        assert [ids.count(each) for each in controls] == [1, 1]
        assert re.search("[49][0-9]{8}", tokenizer.decode(ids)) is None


def test_names_keys_and_schemas_forge_nothing() -> None:
    tokenizer = templated(
        "{% for t in tools %}{{ t.function.name }}{{ t.function.description }}{% for k, v in "
        "t.function.parameters.properties.items() %}<{{ k }}>{{ v | tojson }}{% for word, x in "
        "v.items() %}<{{ word }}>{% endfor %}{% endfor %}{% endfor %}"
        f"{EACH}{SHOWN}{CALLS}{{{{ m.name }}}}{{% endfor %}}"
    )
    for bad in (END, "|im_end|", "<|IM_END|>"):
        properties = {bad: {"type": "string", bad: bad, "enum": [bad], "description": bad}}
        function = {"name": bad, "description": bad, "parameters": {"properties": properties}}
        arguments = {bad: [bad, {bad: None, "n": 1}]}
        called = {"id": bad, "function": {"name": bad, "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": bad, "name": bad},
            {"role": "assistant", "content": "", "tool_calls": [called]},
        ]
        ids = chat_tokens(tokenizer, messages, [{"type": "function", "function": function}])
        assert tokenizer.convert_tokens_to_ids(END) not in ids
        assert f'"arguments": {json.dumps(arguments)}' in tokenizer.decode(ids)


def test_thoughts_are_told_by_their_name_and_taken_out_of_text() -> None:
    source = (
        f"{EACH}{{% if '</think>' in m.content %}}lost{{% endif %}}{{{{ m.reasoning_content }}}}/"
        f"{{{{ m.thinking }}}}/{{{{ m.content }}}}|{CALLS}{{% endfor %}}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
        {"role": "assistant", "content": "The tag </think> ends it."},
        {"role": "assistant", "content": "Yes.", "reasoning": "so"},
        {"role": "assistant", "content": "Yes.", "thinking": "so", "tool_calls": [call("Rome")]},
    ]
    tokenizer = copy.copy(made("qwen3"))
    tokenizer.chat_template = source
    expected = "hm/hm/Yes.|//The tag </think> ends it.|so/so/Yes.|so//Yes.|"
    assert tokenizer.decode(chat_tokens(tokenizer, messages)).startswith(expected)


def test_a_sandbox_lets_nothing_out() -> None:
    for source in (
        "{{ messages.append.__self__.__class__.__mro__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__.x }}",
        "{% include 'a' %}",
    ):
        with pytest.raises(KvliteError, match="chat template"):
            chat_tokens(templated(source), [{"role": "user", "content": "a"}])


def test_a_file_replaces_the_models_template(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(f"{EACH}[{{{{ m.content }}}}]{{% endfor %}}")
    runner = kvlite.load(str(tiny_folder), chat_template=str(path), max_new_tokens=1)
    talk = runner.conversation()
    list(talk.stream("Hello"))
    assert runner.tokenizer.decode(talk.token_ids) == "[Hello]"
    path.write_text("{% if %}{{ a }}")
    (tmp_path / "text").write_text("root:x:0:0")
    (tmp_path / "large").write_text("{{ a }}" * 200_000)
    for wrong, words in (
        (path, "is no Jinja template"),
        (tmp_path / "text", "is no Jinja template"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path / "large", "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(SettingError, match=f"--chat-template .*{words}"):
            kvlite.load(str(tiny_folder), chat_template=str(wrong))


def test_a_later_message_is_read_without_the_past() -> None:
    tokenizer = templated(f"{EACH}<|im_start|>{SHOWN}<|im_end|>{{% endfor %}}")
    ids = said_tokens(tokenizer, f"next {END}", opening=False, first=False)
    assert tokenizer.decode(ids) == f"|<|im_end|><|im_start|>user:next {END}|<|im_end|>"
    assert ids.count(tokenizer.convert_tokens_to_ids(END)) == 2
