"""Tools with OpenAI's client: calls are made, streamed and answered, or refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.model.answers.reader import Part
from kvlite.server.config import ServerConfig
from kvlite.server.response_items import items_of
from tests.server.conftest import Server, said, serving
from tests.server.test_refusing import require_error

# As Qwen and Hermes have it, without their words.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
PARAMETERS: Any = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "What comes.", "parameters": PARAMETERS}
CLOCK: Any = {"name": "clock", "parameters": {"properties": {}, "additionalProperties": False}}
TOOLS: Any = [{"type": "function", "function": each} for each in (WEATHER, CLOCK)]


@pytest.fixture(scope="module")
def tooled(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model with a template that has tools."""
    folder = tmp_path_factory.mktemp("tooled")
    shutil.copytree(tiny_folder, folder / "tooled")
    (folder / "tooled" / "chat_template.jinja").write_text(TEMPLATE)
    settings = Settings(model=str(folder / "tooled"), max_new_tokens=90)
    with serving(settings, ServerConfig(folder=folder)) as found:
        yield found


def require_call(name: str, arguments: str) -> None:
    assert name == "weather"
    found = json.loads(arguments)
    assert found["place"] in ("Rome", "Oslo") and found.get("days", 0) <= 9


def test_a_call_is_made_whole_and_streamed_and_goes_on(tooled: Server) -> None:
    create, name = tooled.client.chat.completions.create, tooled.model.names[0]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    given: dict[str, Any] = {"model": name, "tools": TOOLS, "tool_choice": choice}
    messages = said("Weather?")
    made = create(messages=messages, **given).choices[0]
    assert made.finish_reason == "tool_calls" and made.message.content is None
    assert made.message.tool_calls is not None and len(made.message.tool_calls) == 1
    call: Any = made.message.tool_calls[0]
    require_call(call.function.name, call.function.arguments)
    chunks = list(create(messages=messages, stream=True, **given))
    parts = [part for each in chunks for part in each.choices[0].delta.tool_calls or []]
    assert parts[0].function is not None and parts[0].function.name == "weather" and parts[0].id
    arguments = "".join(part.function.arguments or "" for part in parts if part.function)
    assert arguments == call.function.arguments and {part.index for part in parts} == {0}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(each.choices[0].delta.content for each in chunks)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages += [made.message.model_dump(exclude_none=True), result]
    again = create(messages=messages, model=name, tools=TOOLS, max_tokens=4)
    known = again.usage and again.usage.prompt_tokens_details
    assert known and known.cached_tokens and known.cached_tokens > 100
    assert again.choices[0].message.tool_calls is None
    needed = create(messages=messages, **given | {"tool_choice": "required"}).choices[0].message
    assert needed.tool_calls
    free = create(messages=said("Weather?"), model=name, tools=TOOLS, max_tokens=4)
    plain = create(messages=said("Weather?"), model=name, max_tokens=4)
    none = create(
        messages=said("Weather?"), model=name, tools=TOOLS, tool_choice="none", max_tokens=4
    )
    assert plain.choices[0].message == none.choices[0].message
    assert free.usage and plain.usage and free.usage.prompt_tokens > plain.usage.prompt_tokens + 50


def test_responses_have_calls_as_items(tooled: Server) -> None:
    create, name = tooled.client.responses.create, tooled.model.names[0]
    tools: Any = [{"type": "function", **WEATHER}]
    given: dict[str, Any] = {"model": name, "tools": tools, "tool_choice": "required"}
    given["parallel_tool_calls"] = False
    made = create(input="Weather?", **given)
    (call,) = made.output
    assert call.type == "function_call" and made.status == "completed"
    require_call(call.name, call.arguments)
    told: Any = made.tools[0]
    assert told.strict is None and told.parameters == PARAMETERS
    events: list[Any] = list(create(input="Weather?", stream=True, **given))
    kinds = [each.type.removeprefix("response.") for each in events]
    deltas = [each.delta for each in events if each.type.endswith("arguments.delta")]
    assert len(deltas) > 3 and "".join(deltas) == call.arguments
    assert [each for each in kinds if each != "function_call_arguments.delta"] == [
        *("created", "in_progress", "output_item.added"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert events[-1].response.output[0].arguments == call.arguments
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = create(
        model=name, input=result, previous_response_id=made.id, max_output_tokens=4, tools=tools
    )
    assert second.output_text and second.usage
    assert second.usage.input_tokens_details.cached_tokens > 90
    items: Any = [{"role": "user", "content": "Weather?"}, call.model_dump(), *result]
    whole = create(model=name, input=items, max_output_tokens=4, tools=tools)
    assert whole.output_text == second.output_text


def test_a_stream_has_the_chances_of_a_token_once(
    tooled: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a last one, with which text comes that was held back."""
    reader = SimpleNamespace(is_reasoning=False)
    reader.push = lambda text: [Part("text", text)]
    reader.flush = lambda: [Part("text", ".")]
    monkeypatch.setattr("kvlite.server.chat.AnswerReader", lambda *_, **__: reader)
    given: dict[str, Any] = {"model": tooled.model.names[0], "messages": said("Hi"), "tools": TOOLS}
    chunks = tooled.client.chat.completions.create(
        **given, stream=True, logprobs=True, max_tokens=3
    )
    found = [each.choices[0] for each in chunks if each.choices]
    assert "".join(each.delta.content or "" for each in found).endswith(".")
    assert sum(len(each.logprobs.content or []) for each in found if each.logprobs) == 3


def test_tools_that_cannot_be_used_are_refused(tooled: Server) -> None:
    wrong = {**PARAMETERS, "not": {}}
    for tools, choice, words in (
        ([{"type": "web_search"}], None, "tools[0] is of type 'web_search'"),
        (["weather"], None, "tools[0] is of type 'weather'"),
        ([{"type": "function", "function": {}}], None, "tools[0].name"),
        ([{"type": "function", "function": {"name": "a", "parameters": 1}}], None, "parameters"),
        (TOOLS, {"type": "function", "function": {"name": "no"}}, "'no' is no tool here"),
        (TOOLS, "often", "tool_choice 'often'"),
        (TOOLS * 200, None, "256 at most"),
        (
            [{"type": "function", "function": {**WEATHER, "parameters": wrong, "strict": True}}],
            "auto",
            '(Unimplemented keys: ["not"]): leave strict out',
        ),
    ):
        body = {"messages": said("Hi"), "tools": tools, "tool_choice": choice}
        error = require_error(tooled.http.post("/v1/chat/completions", json=body), 400, words)
        assert error["param"] in ("tools", "tool_choice", None)
    loose = [{"type": "function", "function": {**WEATHER, "parameters": wrong}}]
    body = {"messages": said("Hi"), "tools": loose, "tool_choice": "required"}
    made = tooled.http.post("/v1/chat/completions", json=body).json()
    require_call(**made["choices"][0]["message"]["tool_calls"][0]["function"])


def test_items_of_a_response_are_in_the_order_in_which_they_came() -> None:
    call = Part("name", "weather"), Part("arguments", "{"), Part("arguments", "}")
    parts = Part("reasoning", "Hm"), Part("text", "Let "), Part("text", "me."), *call, *call
    items = items_of([*parts, Part("text", "So.")])
    calls = ["function_call"] * 2
    assert [each["type"] for each in items] == ["reasoning", "message", *calls, "message"]
    assert [each["content"][0]["text"] for each in (items[1], items[-1])] == ["Let me.", "So."]
    assert all(each["arguments"] == "{}" for each in items[2:4])
    assert [each["type"] for each in items_of([])] == ["message"]
    assert [each["type"] for each in items_of([Part("reasoning", "Hm")])] == [
        "reasoning",
        "message",
    ]
