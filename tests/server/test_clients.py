"""Programs that people use, each doing what its users do. They are not installed with kvlite: the
variable CLIENTS_PYTHON names the Python of an environment that has them."""

import json
import os
import subprocess
from typing import Any

import pytest
import torch

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
# As `lm_eval --model local-completions` asks, with the server's tokenizer.
SCORES = """
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
given = dict(model=model, base_url=f"{url}/completions", tokenizer=folder, max_length=900)
pairs = [(question, " A bird."), (40 * question, " It waits."), ("", question)]
asked = [Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(pairs)]
answers = [score for score, _ in LocalCompletionsAPI(**given).loglikelihood(asked)]
"""
MAIN = """
import json, sys
from importlib.util import find_spec
url, model, folder, question, name = sys.argv[1:]
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


def printed(server: Server, name: str, script: str, question: str) -> list[Any]:
    """What a client prints."""
    python = os.environ.get("CLIENTS_PYTHON")
    if not python:
        pytest.skip("CLIENTS_PYTHON names no Python that has clients")
    model = server.model
    given = (f"{server.address}/v1", model.names[0], model.settings.model, question, name)
    command = [python, "-c", MAIN.format(script=script), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode == 77:
        pytest.skip(f"{name} is not installed for {python}")
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_gets_what_transformers_answers(server: Server, reference: Any, name: str) -> None:
    question = "What is a heron?"
    answers = printed(server, name, SCRIPTS[name], question)
    assert answers == [expected(reference, said(question))] * 2


@pytest.mark.long
def test_lm_eval_gets_the_log_likelihoods_of_transformers(server: Server, reference: Any) -> None:
    question = "What is a heron?"
    model, tokenizer = reference
    scores = printed(server, "lm_eval", SCORES, question)
    pairs = [(question, " A bird."), (40 * question, " It waits."), (tokenizer.bos_token, question)]
    for score, (before, after) in zip(scores, pairs, strict=True):
        read, own = (tokenizer.encode(each) for each in (before, after))
        logits = model(torch.tensor([[*read, *own]])).logits.detach()[0, len(read) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(own)[:, None])
        assert abs(score - float(chosen.sum())) < 1e-4
