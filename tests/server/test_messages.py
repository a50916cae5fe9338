"""`/v1/messages` with Anthropic's client: what is said, thought and called, whole and streamed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvlite.config.settings import Settings
from kvlite.server.anthropic import CreateRequest
from kvlite.server.config import ServerConfig
from kvlite.server.fields import parsed
from tests.server.conftest import Server, said, serving, with_template

REAL = Path(os.environ.get("KVLITE_REAL", Path(__file__).parents[3] / "shared/real"))
# As Qwen3 has it: tools, calls, results, reasoning.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<issue_start>\n{{ m.reasoning_content }}\n<issue_closed>\n\n"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<issue_start>\n{% endif %}"
)
WEATHER: Any = {
    "name": "weather",
    "description": "What comes.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
CALLED: Any = [{"type": "tool_use", "id": "toolu_123456789", "name": "weather", "input": {"a": 1}}]


@pytest.fixture(scope="module")
def served(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model with a template that has tools and reasons."""
    folder = tmp_path_factory.mktemp("messages")
    model = with_template(tiny_folder, folder, TEMPLATE)
    settings = Settings(model=str(model), max_new_tokens=90)
    with serving(settings, ServerConfig(folder=folder)) as found:
        yield found


def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key="any", max_retries=0)


def streamed(server: Server, **given: Any) -> tuple[Any, list[Any]]:
    """The message that Anthropic's client makes of a stream, and its events."""
    with client(server).messages.stream(**given) as stream:
        events = [each for each in stream if hasattr(each, "type")]
        return stream.get_final_message(), events


def given_of(server: Server, *texts: str, **more: Any) -> dict[str, Any]:
    return {
        "model": server.model.names[0],
        "messages": said(*texts),
        "max_tokens": 12,
        "thinking": {"type": "disabled"},
        **more,
    }


def plain(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """What messages are in a chat."""
    request = parsed(CreateRequest, {"max_tokens": 9, "messages": [*messages], **more})
    return [each.model_dump(exclude_none=True) for each in request.chat().messages]


def test_an_answer_is_that_of_a_chat_whole_and_streamed(served: Server) -> None:
    given = given_of(served, "What is a heron?")
    made = client(served).messages.create(**given)
    chat = served.client.chat.completions.create(
        model=given["model"], messages=given["messages"], max_tokens=12
    )
    (block,) = made.content
    assert chat.usage is not None and block.type == "text"
    assert block.text == chat.choices[0].message.content
    assert made.stop_reason == "max_tokens" and made.stop_sequence is None
    usage = made.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert usage.output_tokens == 12
    final, events = streamed(served, **given)
    assert (final.content[0].text, final.stop_reason) == (block.text, "max_tokens")
    assert final.usage.cache_read_input_tokens, "the second time it is known"
    kinds = [each.type for each in events if each.type not in ("text", "content_block_delta")]
    assert kinds == [
        *("message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    counted = client(served).messages.count_tokens(
        model=given["model"], messages=given["messages"], thinking={"type": "disabled"}
    )
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_where_an_answer_ends_is_told(served: Server) -> None:
    given = given_of(served, "What is a heron?")
    text = client(served).messages.create(**given).content[0].text  # type: ignore[union-attr]
    stop = text[3:6]
    made = client(served).messages.create(**{**given, "stop_sequences": ["never", stop]})
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)
    assert made.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]
    begun = client(served).messages.create(**given_of(served, "What?", "A"))
    assert begun.content[0].type == "text", "the answer that the request began goes on"
    long, _ = streamed(served, **{**given, "max_tokens": 32_000})
    assert long.stop_reason in ("end_turn", "model_context_window_exceeded")


def test_any_model_name_is_answered(served: Server) -> None:
    made = client(served).messages.create(**{**given_of(served, "A?"), "model": "claude-haiku-4-5"})
    assert made.model == served.model.names[0]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_a_block_that_goes_back(served: Server, stream: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    given = given_of(served, "Which?", thinking=thinking, max_tokens=40)
    given["output_config"] = {
        "format": {"type": "json_schema", "schema": {"enum": ["red", "blue"]}},
        "effort": "high",
    }
    if stream:
        made, events = streamed(served, **given)
        kinds = {each.delta.type for each in events if each.type == "content_block_delta"}
        assert kinds == {"thinking_delta", "signature_delta", "text_delta"}
    else:
        made = client(served).messages.create(**given)
    thought, text = made.content
    assert thought.type == "thinking" and thought.thinking and thought.signature
    assert text.text in ('"red"', '"blue"') and made.stop_reason == "end_turn"
    back = {"role": "assistant", "content": [thought.model_dump(), text.model_dump()]}
    (told,) = plain(back)
    assert (told["reasoning_content"], told["content"]) == (thought.thinking, text.text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_made_and_answered(served: Server, stream: bool) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    given = given_of(served, "Weather?", tools=[SEARCH, WEATHER], tool_choice=choice, max_tokens=90)
    given["thinking"] = {"type": "enabled", "budget_tokens": 5}
    made = streamed(served, **given)[0] if stream else client(served).messages.create(**given)
    call = made.content[-1]
    assert (made.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert call.id.startswith("toolu_") and call.input["place"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    messages = [
        *given["messages"],
        {"role": "assistant", "content": [each.model_dump() for each in made.content]},
        {"role": "user", "content": [result]},
    ]
    after = {**given, "messages": messages, "tool_choice": {"type": "auto"}, "max_tokens": 4}
    assert client(served).messages.create(**after).usage.cache_read_input_tokens


def test_results_and_what_stands_beside_them() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "AA"}}
    blocks = [
        {"type": "text", "text": "Look."},
        {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "no"},
        {"type": "tool_result", "tool_use_id": "toolu_2"},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_3",
            "content": [
                {"type": "text", "text": "a"},
                image,
                {"type": "tool_reference", "tool_name": "clock"},
                {"type": "document", "title": "T", "source": {"type": "text", "data": "d"}},
            ],
        },
    ]
    made = plain({"role": "assistant", "content": CALLED}, {"role": "user", "content": blocks})
    assert made[0]["tool_calls"][0]["id"] == "123456789"
    assert [each.get("tool_call_id") for each in made[1:]] == ["1", "2", "3"]
    assert [each["content"] for each in made[1:]] == [
        "Error: no",
        "",
        "a\n[an image, which this model cannot see]\nThe tool clock is here.\nT\nd\n\nLook.",
    ]


def test_what_the_system_says_stands_where_templates_take_it() -> None:
    system = [
        {"type": "text", "text": "You are a clerk."},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    made = plain(
        {"role": "user", "content": "A?"}, {"role": "system", "content": "Late."}, system=system
    )
    assert [each["role"] for each in made] == ["system", "user"]
    assert made[0]["content"] == "You are a clerk.\nBe brief."
    texts = [part["text"] for part in made[1]["content"]]
    assert texts == ["A?", "<system-reminder>\nLate.\n</system-reminder>"]


def test_what_claude_code_sends_is_a_chat() -> None:
    if not (file := REAL / "requests/claude-code.json").is_file():
        pytest.skip("requests of real clients are not here")
    body = json.loads(file.read_text())["body"]
    chat = parsed(CreateRequest, body).chat()
    assert chat.messages[0].role == "system" and chat.messages[1].role == "user"
    assert len(chat.tools or []) == len(body["tools"]) and chat.max_tokens == 32_000
    assert chat.thinking == {"type": "enabled"} and chat.reasoning_effort == "high"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "messages is not a list"),
    ({"messages": [1]}, "messages[0] is not an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "type is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "'video'"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}
                    ],
                }
            ]
        },
        "file_id",
    ),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens is not a whole number"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"temperature": "hot"}, "temperature is not a number"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 5.0}, "top_p"),
    ({"top_k": -3}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences is not a list"),
    ({"stop_sequences": ["x"] * 99}, "stop strings"),
    ({"tools": {}}, "tools is not a list"),
    ({"tools": [{}]}, "tools[0]"),
    ({"tools": [{"name": "a b"}]}, "'a b'"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice is not an object"),
    ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
    ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "web_search"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "deep"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": -4}}, "budget"),
    ({"thinking": True}, "thinking"),
    ({"output_config": {"effort": "huge"}}, "huge"),
    ({"output_config": {"format": {"type": "xml"}}}, "xml"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "schema"),
    ({"stream": "yes"}, "stream is not true or false"),
    ({"kvlite": {"budget": "-1"}}, "budget"),
    ({"kvlite": {"speed": 1}}, "kvlite.speed"),
    ({"max_token": 5, "max_tokens": None}, "max_token"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "prompt is too long"),
]


@pytest.mark.parametrize(("change", "part"), BAD, ids=[json.dumps(each)[:50] for each, _ in BAD])
def test_what_is_wrong_is_told_in_anthropics_shape(
    served: Server, change: dict[str, Any], part: str
) -> None:
    given = {**given_of(served, "A?"), **change}
    body = {name: value for name, value in given.items() if value is not None}
    for more in ({}, {"stream": True}) if "stream" not in change else ({},):
        found = served.http.post("/v1/messages", json={**body, **more})
        error = found.json()
        assert (found.status_code, error["type"]) == (400, "error")
        assert error["error"]["type"] == "invalid_request_error"
        assert part in error["error"]["message"], error


def test_errors_have_the_classes_of_anthropics_client(
    served: Server, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client(served).messages.create(**given_of(served, "A?", max_tokens=-2))
    assert served.http.post("/v1/messages", content=b"{").json()["type"] == "error"
    assert served.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    locked = ServerConfig(folder=tmp_path, keys=("right",))
    with serving(Settings(model=str(tiny_folder)), locked, loaded=False) as found:
        with pytest.raises(anthropic.AuthenticationError):
            client(found).messages.create(**given_of(found, "A?"))
        right = anthropic.Anthropic(base_url=found.address, api_key="right", max_retries=0)
        with pytest.raises(anthropic.APIStatusError) as refused:
            right.messages.create(**given_of(found, "A?", max_tokens=-2))
        assert refused.value.status_code != 401


def test_counting_prepares_no_grammar_and_counts_what_is_read(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = given_of(served, "What is a heron?", tools=[WEATHER], tool_choice={"type": "any"})
    output = {"format": {"type": "json_schema", "schema": {"enum": ["red", "blue"]}}}
    made = client(served).messages.create(**given)
    read = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)

    def none(*_: Any, **__: Any) -> Any:
        raise AssertionError("counting needs no grammar")

    for name in ("kvlite.server.tools.answer_grammar", "kvlite.server.tools.Grammar"):
        monkeypatch.setattr(name, none)
    monkeypatch.setattr("kvlite.server.chat.ToolUse.grammar", none)
    monkeypatch.setattr("kvlite.server.fields.Sampled.settings", none)
    asked = {name: given[name] for name in ("model", "messages", "tools", "tool_choice")}
    off: Any = {"type": "disabled"}
    counted = client(served).messages.count_tokens(**asked, thinking=off)
    assert counted.input_tokens == read
    followed = client(served).messages.count_tokens(
        model=given["model"],
        messages=given["messages"],
        thinking=off,
        extra_body={"output_config": output},
    )
    assert 0 < followed.input_tokens < read
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client(served).messages.count_tokens(**{**asked, "tools": [{"name": "a b"}]})
