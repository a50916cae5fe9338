"""Reasoning with OpenAI's client: told apart, counted, limited, and sent back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from kvlite.server.messages import Message
from kvlite.server.response_input import Item
from kvlite.server.thinking import Reasons
from tests.server.conftest import Server, said, serving, with_template
from tests.server.test_refusing import require_error

# As Qwen3.5 has it: the prompt begins reasoning, unless it is told not to. Tokens are this
# vocabulary's.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<issue_start>\n"
    "{{ m.reasoning_content }}\n<issue_closed>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<issue_start>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n<issue_closed>\n\n"
    "{% endif %}{% endif %}"
)
COLORS: Any = {
    "type": "json_schema",
    "json_schema": {"name": "c", "schema": {"enum": ["red", "blue"]}},
}


@pytest.fixture(scope="module")
def thinking(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model with a template that reasons."""
    folder = tmp_path_factory.mktemp("thinking")
    model = with_template(tiny_folder, folder, TEMPLATE)
    settings = Settings(model=str(model), max_new_tokens=90)
    with serving(settings, ServerConfig(folder=folder)) as found:
        yield found


def test_reasoning_is_told_apart_counted_and_limited(thinking: Server) -> None:
    create = thinking.client.chat.completions.create
    given: dict[str, Any] = {"model": thinking.model.names[0], "messages": said("Which?")}
    given["response_format"] = COLORS
    limited = given | {"extra_body": {"thinking_budget": 5}}
    made = create(**limited)
    message: Any = made.choices[0].message
    assert message.content in ('"red"', '"blue"') and message.reasoning_content
    details: Any = made.usage and made.usage.completion_tokens_details
    assert details.reasoning_tokens == 6, "the token that ends it included"
    chunks = list(create(**limited, stream=True))
    deltas: list[Any] = [each.choices[0].delta for each in chunks if each.choices]
    told = "".join(getattr(each, "reasoning_content", None) or "" for each in deltas)
    assert told == message.reasoning_content
    assert "".join(each.content or "" for each in deltas) == message.content
    off = create(**given, extra_body={"enable_thinking": False}).choices[0].message
    assert off.content in ('"red"', '"blue"') and not hasattr(off, "reasoning_content")


def test_responses_have_reasoning_as_an_item_that_goes_back(thinking: Server) -> None:
    create, name = thinking.client.responses.create, thinking.model.names[0]
    form: Any = {"format": {"type": "json_schema", "name": "c", "schema": {"enum": ["red"]}}}
    given: dict[str, Any] = {"model": name, "text": form, "extra_body": {"thinking_budget": 5}}
    made = create(input="Which?", **given)
    thought, message = made.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text
    assert message.type == "message" and made.output_text == '"red"'
    assert made.usage and made.usage.output_tokens_details.reasoning_tokens >= 5
    events: list[Any] = list(create(input="Which?", stream=True, **given))
    kinds = [each.type.removeprefix("response.") for each in events]
    for kind in ("reasoning_text.delta", "reasoning_text.done", "output_text.done", "completed"):
        assert kind in kinds
    deltas = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought.content[0].text
    assert [each.sequence_number for each in events] == [*range(len(events))]
    items: Any = [
        {"role": "user", "content": "Which?"},
        *(each.model_dump() for each in made.output),
    ]
    again = create(
        input=[*items, {"role": "user", "content": "And?"}], max_output_tokens=4, model=name
    )
    follow = create(input="And?", previous_response_id=made.id, max_output_tokens=4, model=name)
    assert again.usage and follow.usage
    assert again.usage.input_tokens == follow.usage.input_tokens


def test_fields_of_all_servers_say_whether_it_reasons() -> None:
    usual = Settings()
    for given, on in (
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ({"thinking": True}, True),
        ({"thinking_budget": 0}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ):
        assert Reasons(**given).variables(usual).get("enable_thinking") is on, given
    assert Reasons(reasoning_effort="high").variables(usual)["reasoning_effort"] == "high"
    for given, most in (
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 9),
        ({"thinking_token_budget": 7}, 7),
        ({"reasoning": {"max_tokens": 8}}, 8),
        ({"reasoning_budget": -1}, None),
    ):
        assert Reasons(**given).most_reasoning == most


def test_wrong_words_are_refused(thinking: Server) -> None:
    for body, words in (
        ({"reasoning_effort": "much"}, "'much' is none of"),
        ({"thinking": {"type": "often"}}, "thinking.type 'often'"),
        ({"thinking_budget": -5}, "-5 tokens of reasoning"),
    ):
        asked = {"messages": said("Hi"), **body}
        require_error(thinking.http.post("/v1/chat/completions", json=asked), 400, words)


def test_reasoning_comes_back_in_all_ways() -> None:
    for message in (
        Message(role="assistant", content="a", reasoning_content="Hm"),
        Message(role="assistant", content="a", reasoning="Hm"),
        Message.model_validate(
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "a"}],
            }
        ),
    ):
        wanted = {"role": "assistant", "content": "a", "reasoning_content": "Hm"}
        assert message.plain(0) == wanted
    for item in (
        {"content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"summary": [{"type": "summary_text", "text": "Hm"}]},
        {"summary": [], "encrypted_content": "SG0="},
    ):
        made = Item.model_validate({"type": "reasoning", **item}).plain(0)
        assert made["reasoning_content"] == "Hm"


def test_an_answer_that_is_begun_within_reasoning_goes_on_with_it(thinking: Server) -> None:
    begun = [*said("Which?"), {"role": "assistant", "content": "<issue_start>\nRed or"}]
    body = {"messages": begun, "max_tokens": 4, "model": thinking.model.names[0]}
    made = thinking.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert made["reasoning_content"] and not made["content"]
    tokenizer = thinking.model.ready().tokenizer
    spaced = next(at for at in range(len(tokenizer)) if tokenizer.decode([at]) == " t")
    body |= {"max_tokens": 1, "logit_bias": {str(spaced): 100}}
    made = thinking.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert made["reasoning_content"] == " t", "as it goes on with what was sent"
