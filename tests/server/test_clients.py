"""Programs that people use, each doing what its users do. They are not installed with kvlite: the
variable CLIENTS_PYTHON names the Python of an environment that has them."""

import json
import os
import subprocess
from typing import Any

import pytest

from tests.server.conftest import Server, said
from tests.server.test_chat import expected, reference

__all__ = ["reference"]

# Each prints a list of answers to the question, in the ways that it has.
SCRIPTS = {
    "litellm": """
import litellm
given = dict(model=f"openai/{model}", api_base=url, api_key="any", messages=messages, max_tokens=8)
whole = litellm.completion(**given).choices[0].message.content
parts = litellm.completion(stream=True, **given)
streamed = "".join(each.choices[0].delta.content or "" for each in parts)
answers = [whole, streamed]
""",
    "langchain_openai": """
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(base_url=url, api_key="any", model=model, max_tokens=8)
answers = [chat.invoke(question).content]
answers.append("".join(each.content for each in chat.stream(question)))
held = ChatOpenAI(base_url=url, api_key="any", model=model, max_tokens=60)
schema = {"title": "Bird", "type": "object", "properties": {"color": {"enum": ["red", "blue"]}},
          "required": ["color"], "additionalProperties": False}
found = held.with_structured_output(schema, method="json_schema").invoke(question)
assert found["color"] in ("red", "blue"), found
""",
    "llama_index.llms.openai_like": """
from llama_index.llms.openai_like import OpenAILike
from llama_index.core.llms import ChatMessage
given = dict(model=model, api_base=url, api_key="any", max_tokens=8, temperature=0.0)
chat = OpenAILike(is_chat_model=True, **given)
said = [ChatMessage(role="user", content=question)]
answers = [chat.chat(said).message.content]
answers.append("".join(each.delta or "" for each in chat.stream_chat(said)))
assert OpenAILike(is_chat_model=False, **given).complete("A heron").text
""",
}
MAIN = """
import json, sys
from importlib.util import find_spec
url, model, question, name = sys.argv[1:]
messages = [{{"role": "user", "content": question}}]
try:
    there = find_spec(name) is not None
except ImportError:
    there = False
if not there:
    sys.exit(77)
{script}
print(json.dumps(answers))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_gets_what_transformers_answers(server: Server, reference: Any, name: str) -> None:
    python = os.environ.get("CLIENTS_PYTHON")
    if not python:
        pytest.skip("CLIENTS_PYTHON names no Python that has clients")
    question, script = "What is a heron?", MAIN.format(script=SCRIPTS[name])
    command = [python, "-c", script, f"{server.address}/v1", server.model.names[0], question, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode == 77:
        pytest.skip(f"{name} is not installed for {python}")
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers == [expected(reference, said(question))] * 2
