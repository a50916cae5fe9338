"""`/v1/completions` and the tokenizer's addresses, against transformers' own numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlite.server.counters import Counters
from tests.server.conftest import Server, said
from tests.server.test_refusing import require_error

TEXT = "A heron stands in the water, and waits for a fish."


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()
    return model, AutoTokenizer.from_pretrained(tiny_folder)


@torch.no_grad()
def logprobs_of(reference: Any, ids: list[int]) -> torch.Tensor:
    """Of what follows each token, `(n, vocab)`."""
    found: torch.Tensor = reference[0](torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


def generated(reference: Any, ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        ids = [*ids, int(logprobs_of(reference, ids)[-1].argmax())]
    return ids[-count:]


def test_a_text_and_its_tokens_go_on_alike(server: Server, reference: Any) -> None:
    ids = reference[1].encode(TEXT)
    expected = reference[1].decode(generated(reference, ids, 6))
    create = server.client.completions.create
    name = server.model.names[0]
    for prompt in (TEXT, ids, [TEXT, TEXT], [ids, ids, ids]):
        made = create(model=name, prompt=prompt, max_tokens=6)
        assert [each.text for each in made.choices] == [expected] * len(made.choices)
        assert made.usage is not None
        assert made.usage.completion_tokens == 6 * len(made.choices)
        assert made.usage.prompt_tokens == len(ids) * len(made.choices)
    chunks = list(create(model=name, prompt=TEXT, max_tokens=6, stream=True, echo=True))
    assert "".join(each.choices[0].text for each in chunks) == TEXT + expected
    assert chunks[-1].choices[0].finish_reason == "length"
    assert create(model=name, prompt=TEXT).usage.completion_tokens == 16  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompts_own_log_probabilities_are_those_of_transformers(
    server: Server, reference: Any, stream: bool
) -> None:
    """As lm-eval asks for them."""
    ids = [*reference[1].encode(TEXT * 8)]
    body = {
        "model": server.model.names[0],
        "prompt": [ids],
        "max_tokens": 1,
        "logprobs": 2,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    if stream:
        chunks = list(server.client.completions.create(**body, stream=True))  # type: ignore[call-overload]
        parts = [each.choices[0].logprobs for each in chunks if each.choices[0].logprobs]
        found = [value for each in parts for value in each.token_logprobs]
        tops = [value for each in parts for value in each.top_logprobs]
    else:
        answer = server.http.post("/v1/completions", json=body).json()
        logprobs = answer["choices"][0]["logprobs"]
        found, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
        assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
        assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert len(found) == len(tops) == len(ids) + 1 and found[0] is None and tops[0] is None
    truth = logprobs_of(reference, ids)
    own = truth[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert found[1:-1] == pytest.approx(own.tolist(), abs=1e-4)
    best = truth.max(-1).values.tolist()
    assert [max(each.values()) for each in tops[1:]] == pytest.approx(best, abs=1e-4)
    assert found[-1] == pytest.approx(best[-1], abs=1e-4)


def test_a_prompt_can_be_scored_without_an_answer(server: Server, reference: Any) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = server.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == TEXT and answer["usage"]["completion_tokens"] == 0
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert len(found) == len(reference[1].encode(TEXT))
    body = {"prompt": [7], "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = server.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "prompt is empty"),
        ({"prompt": ""}, 400, "prompt is empty"),
        ({"prompt": []}, 400, "prompt is empty"),
        ({"prompt": [[]]}, 400, "a prompt is empty"),
        ({"prompt": [[5], "a"]}, 400, "prompt"),
        ({"prompt": [5, "a"]}, 400, "prompt"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "token -1"),
        ({"prompt": [99_999]}, 400, "token 99999"),
        ({"prompt": [5] * 1025}, 400, "do not fit"),
        ({"prompt": ["a"] * 999}, 400, "999 prompts"),
        ({"prompt": "a", "max_tokens": -2}, 400, "max_tokens -2"),
        ({"prompt": "a", "logprobs": 99}, 400, "logprobs 99"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ({"prompt": "a", "best_of": 4}, 400, "best_of"),
    ],
)
def test_what_makes_no_sense_is_refused(
    server: Server, body: dict[str, Any], status: int, words: str
) -> None:
    require_error(server.http.post("/v1/completions", json=body), status, words)


def test_texts_and_chats_as_tokens_and_back(server: Server, reference: Any) -> None:
    tokenizer = reference[1]
    for body in ({"prompt": TEXT}, {"content": TEXT, "add_special": True}):
        found = server.http.post("/tokenize", json=body).json()
        assert found == {
            "tokens": tokenizer.encode(TEXT),
            "count": len(tokenizer.encode(TEXT)),
            "max_model_len": 1024,
        }
    chat = server.http.post("/tokenize", json={"messages": said("Hi")}).json()["tokens"]
    shown = tokenizer.apply_chat_template(said("Hi"), tokenize=False, add_generation_prompt=True)
    assert chat == tokenizer.encode(shown)
    text = server.http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert text == {"prompt": TEXT, "content": TEXT}
    require_error(server.http.post("/detokenize", json={"tokens": [-1]}), 400, "token -1")
    require_error(server.http.post("/detokenize", json={}), 400, "tokens")
    require_error(server.http.post("/tokenize", json={"messages": []}), 400, "messages is empty")


def test_metrics_count_what_was_read(server: Server) -> None:
    assert "kvlite:prompt_tokens_total 12345678\n" in Counters(prompt=12_345_678).text(0)

    def numbers() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        rows = (line.split() for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    before = numbers() | {}
    body = {"messages": said("Count this. " * 50), "max_tokens": 4}
    usages = [server.http.post("/v1/chat/completions", json=body).json()["usage"] for _ in (1, 2)]
    after = numbers()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kvlite:prompt_tokens_total"] == 2 * usages[0]["prompt_tokens"]
    read = sum(each["kvlite"]["prompt_tokens"] for each in usages)
    assert grown["kvlite:read_tokens_total"] == read < 2 * usages[0]["prompt_tokens"]
    assert grown["kvlite:tokens_predicted_total"] == 8 and grown["kvlite:answers_total"] == 2
    assert grown["kvlite:tokens_predicted_seconds_total"] > 0
    long = {"messages": said("Go on."), "max_tokens": 700, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=long) as response:
        lines = response.iter_lines()
        next(lines)
        during = numbers()
    states = ("kvlite:requests_processing", "kvlite:requests_deferred")
    assert [during[each] for each in states] == [1, 0]


def test_the_end_of_an_answer_is_no_token_of_it(server: Server) -> None:
    (end,) = server.model.ready().model.stop_ids
    body = {"prompt": "Hi", "logprobs": 1, "max_tokens": 5, "logit_bias": {str(end): 100}}
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["logprobs"]["tokens"]) == ("", "stop", [])
    chunks = server.http.post("/v1/completions", json={**body, "stream": True}).text
    assert '"finish_reason": "stop"' in chunks and "token_logprobs" not in chunks
