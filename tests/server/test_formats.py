"""`response_format` with OpenAI's client: answers are JSON by the schema."""

from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import Server, said


class Bird(BaseModel, extra="forbid"):
    color: str = Field(max_length=3)
    legs: int = Field(ge=1, le=4)


SCHEMA: Any = {"name": "bird", "schema": Bird.model_json_schema(), "strict": True}


def test_answers_follow_their_response_format(server: Server) -> None:
    client, name, messages = server.client, server.model.names[0], said("Which bird?")
    given: dict[str, Any] = {"model": name, "messages": messages, "max_tokens": 200}
    found = client.chat.completions.parse(**given, response_format=Bird)
    bird = found.choices[0].message.parsed
    assert isinstance(bird, Bird) and found.choices[0].finish_reason == "stop"
    form = {"type": "json_schema", "json_schema": SCHEMA}
    chunks = client.chat.completions.create(**given, response_format=form, stream=True)
    texts = [each.choices[0].delta.content or "" for each in chunks]
    assert Bird.model_validate_json("".join(texts)) == bird
    # The same conversation goes on, and what another answer had to follow is forgotten.
    free = client.chat.completions.create(**given).choices[0].message.content or ""
    with pytest.raises(ValueError, match="JSON"):
        Bird.model_validate_json(free)
    made = client.completions.create(
        model=name, prompt="A bird:", max_tokens=200, extra_body={"response_format": form}
    )
    assert Bird.model_validate_json(made.choices[0].text)
    any_object = client.chat.completions.create(
        **given | {"max_tokens": 1}, response_format={"type": "json_object"}
    )
    assert (any_object.choices[0].message.content or "").startswith("{")
    answer = client.responses.parse(
        model=name, input="Which bird?", max_output_tokens=200, text_format=Bird
    )
    assert isinstance(answer.output_parsed, Bird)
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.type == "json_schema"
