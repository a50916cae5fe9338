"""Chat templates as models publish them, with their own control tokens: what is said is read as
the template writes it, and none of it becomes a control token."""

import copy
import json
import os
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from kvlite.errors import ChatTemplateError
from kvlite.model.chat_template import chat_tokens
from kvlite.model.control_tokens import Controls
from kvlite.model.jinja_template import render
from kvlite.model.template_messages import described, normalized, normalized_tools
from tests.families import FAMILIES

REAL = Path(os.environ.get("KVLITE_REAL", Path(__file__).parents[2] / "shared/real"))
TEMPLATES = sorted((REAL / "templates").glob("*.jinja"))
NAMES: list[Any] = [each.stem for each in TEMPLATES] or [
    pytest.param("", marks=pytest.mark.skip(f"there is no {REAL}/templates: set KVLITE_REAL"))
]
_MARKER = re.compile(r"<[|\uff5c/]?[A-Za-z_\u2581:|\uff5c][^<>\n{}'\" ]*>|\[/?[A-Z_]{3,}\]")
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a place",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "clock"}},
]


def small(family: str) -> Any:
    """A tokenizer of bytes, or of pieces, and a few merges: how templates are read depends on no
    more of it."""
    return FAMILIES[family].tokenizer()


@pytest.fixture(params=["smollm2", "mixtral"])
def vocabulary(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


def with_template(vocabulary: Any, name: str) -> tuple[Any, list[str]]:
    source = (REAL / "templates" / f"{name}.jinja").read_text()
    tokenizer = copy.deepcopy(vocabulary)
    markers = [*dict.fromkeys(_MARKER.findall(source))]
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in markers])
    tokenizer.chat_template = source
    return tokenizer, markers


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call00{number:03}", "type": "function", "function": function}


def conversation(say: Any) -> list[dict[str, Any]]:
    """Of every kind; `say` gives what stands in each place."""
    return [
        {"role": "system", "content": say("Be brief.")},
        {"role": "user", "content": say("Weather?")},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("get_weather", 1, city=say("Ham"))],
        },
        {
            "role": "tool",
            "tool_call_id": "call00001",
            "name": "get_weather",
            "content": say("rain"),
        },
        {"role": "assistant", "content": say("It rains."), "reasoning_content": say("rain, so")},
        {"role": "user", "content": say("And then?")},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                call("get_weather", 2, city=say("York"), days=3),
                call("clock", 3, **{say("zone"): say("UTC")}),
            ],
        },
        {"role": "tool", "tool_call_id": "call00002", "name": "get_weather", "content": say("sun")},
        {"role": "tool", "tool_call_id": "call00003", "name": "clock", "content": say("noon")},
        {
            "role": "assistant",
            "content": say("Wait."),
            "tool_calls": [call("clock", 4, zone=say("UT"))],
        },
        {"role": "tool", "tool_call_id": "call00004", "name": "clock", "content": say("one")},
    ]


def tools(say: Any) -> list[dict[str, Any]]:
    made = copy.deepcopy(TOOLS)
    made[0]["function"]["description"] = say("Weather of a place")
    made[0]["function"]["parameters"]["properties"]["city"]["description"] = say("Where")
    return made


def plain(text: str) -> str:
    return text


VARIABLES: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
# Templates that leave out or refuse something, and what is changed of it.
CALLS, ONE, SYSTEM = "calls as text", "one call a message", "the system message in the user's"
USER = "results from the user"
CHANGED = {
    "GigaChat3-10B-A1.8B": {ONE},
    "HuggingFaceTB-SmolLM3-3B": {CALLS},
    "LFM2-8B-A1B": {CALLS},
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {CALLS},
    "google-gemma-2-2b-it": {SYSTEM, CALLS, USER, ONE},
    "llama-cpp-deepseek-r1": {"calls apart from text"},
    "llama-cpp-rwkv-world": {CALLS, USER},
    "meetkai-functionary-medium-v3.2": {"arguments as text"},
    "meta-llama-Llama-3.1-8B-Instruct": {ONE},
    "meta-llama-Llama-3.2-3B-Instruct": {ONE},
    "meta-llama-Llama-3.3-70B-Instruct": {ONE},
    "microsoft-Phi-3.5-mini-instruct": {CALLS, USER},
    "mistralai-Mistral-Nemo-Instruct-2407": {SYSTEM},
    "openai-gpt-oss-120b": {ONE},
}


@pytest.mark.cases(43)
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_plain_rendering(
    vocabulary: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, _ = with_template(vocabulary, name)
    caplog.set_level("INFO", "kvlite.templates")
    for end, told, variables in product((2, 4, 6, 9, 11), ([], tools(plain)), VARIABLES):
        messages = conversation(plain)[:end]
        caplog.clear()
        ids = chat_tokens(tokenizer, messages, told, variables)
        if caplog.messages:
            _, _, changes = caplog.messages[0].partition("is given ")
            assert {*changes.split(", ")} <= CHANGED.get(name, set())
            continue
        form = normalized(messages, tokenizer.chat_template)
        try:
            shown = render(tokenizer, form, normalized_tools(told), variables)
        except ChatTemplateError:
            shown = render(tokenizer, form, described(normalized_tools(told)), variables)
        assert ids == tokenizer.encode(shown, add_special_tokens=False)


def forged(marker: str) -> list[str]:
    return [f"a {marker} b {marker.upper()}", marker]


@pytest.mark.cases(43)
@pytest.mark.parametrize("name", NAMES)
def test_no_control_token_comes_out_of_what_is_said(vocabulary: Any, name: str) -> None:
    tokenizer, markers = with_template(vocabulary, name)
    controls = Controls(tokenizer)
    harmless = chat_tokens(tokenizer, conversation(plain), tools(plain))
    for text in [form for marker in markers[:40] for form in forged(marker)] + [" ".join(markers)]:
        ids = chat_tokens(
            tokenizer, conversation(f"{{}} {text}".format), tools(f"{{}} {text}".format)
        )
        assert controls.among(ids) == controls.among(harmless), text
