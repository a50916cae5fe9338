"""`/v1/chat/completions` as OpenAI's client uses it, against transformers' own answers."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from tests.server.conftest import Server, said, serving


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()
    return model, AutoTokenizer.from_pretrained(tiny_folder)


def expected(reference: Any, messages: list[Any], count: int = 8) -> str:
    """What transformers answers."""
    model, tokenizer = reference
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    made = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_an_answer_is_that_of_transformers(server: Server, reference: Any) -> None:
    messages = said("What is a heron?")
    made = server.client.chat.completions.create(model=server.model.names[0], messages=messages)
    assert made.choices[0].message.content == expected(reference, messages)
    assert (made.object, made.choices[0].finish_reason) == ("chat.completion", "length")
    assert str(made.system_fingerprint).startswith("kvlite-")
    assert made.choices[0].message.annotations == []
    assert made.usage is not None and made.usage.completion_tokens == 8
    assert made.usage.total_tokens == made.usage.prompt_tokens + 8
    assert made.usage.model_dump()["kvlite"]["model"] == server.model.names[0] == "tiny"


def test_a_stream_is_the_same_answer_with_its_usage(server: Server, reference: Any) -> None:
    messages = said("And a stork?")
    chunks = list(
        server.client.chat.completions.create(
            model=server.model.names[0],
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(texts) == expected(reference, messages) and len(chunks) > 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "length"
    assert not chunks[-1].choices and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert all(each.usage is None for each in chunks[:-1])


def test_clients_at_once_are_answered_as_each_alone(server: Server, reference: Any) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0)

    async def ask(text: str) -> str:
        made = await client.chat.completions.create(
            model=server.model.names[0], messages=said(text)
        )
        return made.choices[0].message.content or ""

    async def every() -> list[str]:
        return list(await asyncio.gather(*(ask(f"number {each}") for each in range(8))))

    found = asyncio.run(every())
    assert found == [expected(reference, said(f"number {each}")) for each in range(8)]


def test_a_chat_sent_whole_reads_only_what_is_new(server: Server, reference: Any) -> None:
    name, document = server.model.names[0], "A heron stands in the water. " * 60
    messages = said(f"{document}\n\nWhere does it stand?")
    create = server.client.chat.completions.create
    first = create(model=name, messages=messages)
    assert first.usage is not None
    whole = first.usage.prompt_tokens
    messages += said("", first.choices[0].message.content or "")[1:] + said("And when?")
    # A request for a title in between, which has nothing in common with it.
    create(model=name, messages=said("Give a title."))
    second = create(model=name, messages=messages)
    assert second.usage is not None
    new = second.usage.prompt_tokens - whole
    ledger = second.usage.model_dump()["kvlite"]
    # The random model's answer may be other tokens once it is text.
    assert ledger["prompt_tokens"] <= new + 1 < whole / 5
    cached = second.usage.prompt_tokens_details
    assert cached is not None
    assert cached.cached_tokens == second.usage.prompt_tokens - ledger["prompt_tokens"]
    assert second.choices[0].message.content == expected(reference, messages)
    edited = [*said(f"{document}\n\nWhat stands there?")]
    third = create(model=name, messages=edited)
    assert third.usage is not None
    assert third.usage.model_dump()["kvlite"]["prompt_tokens"] < 30
    assert third.choices[0].message.content == expected(reference, edited)


def test_an_answer_ends_before_a_stop_string(server: Server, reference: Any) -> None:
    text = expected(reference, said("Tell."))
    stop = text[len(text) // 2 :][:4]
    made = server.client.chat.completions.create(
        model=server.model.names[0], messages=said("Tell."), stop=[stop]
    )
    assert made.choices[0].message.content == text.partition(stop)[0]
    assert made.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_transformers(server: Server, reference: Any) -> None:
    messages = said("How likely?")
    made = server.client.chat.completions.create(
        model=server.model.names[0], messages=messages, logprobs=True, top_logprobs=3
    )
    model, tokenizer = reference
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ids = ids if isinstance(ids, list) else ids["input_ids"]
    found = made.choices[0].logprobs
    assert found is not None and found.content is not None and len(found.content) == 8
    for each in found.content:
        logits = model(torch.tensor([ids])).logits[0, -1].detach().log_softmax(-1)
        best = logits.topk(3)
        assert each.logprob == pytest.approx(float(best.values[0]), abs=1e-4)
        values = [other.logprob for other in each.top_logprobs]
        assert values == pytest.approx(best.values.tolist(), abs=1e-4)
        ids = [*ids, int(best.indices[0])]
        assert each.token == tokenizer.decode([ids[-1]])


def test_a_client_that_goes_away_stops_its_answer(server: Server) -> None:
    body = {"messages": said("Go on."), "max_tokens": 900, "stream": True, "kvlite": {}}
    before = server.state.counters.generated
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    server.until_idle()
    assert server.state.counters.generated - before < 400
    body["stream"], before = False, server.state.counters.generated
    with pytest.raises(Exception, match="timed out"):
        server.http.post("/v1/chat/completions", json=body, timeout=0.2)
    server.until_idle()
    assert server.state.counters.generated - before < 900


def test_models_answer_while_something_is_read(server: Server) -> None:
    over, tasks = threading.Event(), []
    tasks.append(server.state.engine.submit(lambda work: over.wait(120), "Reading"))
    try:
        listed = server.client.models.list(timeout=60).data
        assert listed[0].id == server.model.names[0]
        about = server.http.get(f"/v1/models/{listed[0].id}").json()
        assert about["max_model_len"] == about["meta"]["n_ctx"] == 1024
        assert server.http.get("/health").json() == {"status": "ok"}
    finally:
        over.set()


def test_who_waits_is_told_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlite.server.served_model.BEAT", 0.05)
    over = threading.Event()
    server.state.engine.submit(lambda work: over.wait(120), "Reading")
    body = {"messages": said("Hello."), "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": waiting, 1 before this one"
        over.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["delta"]["role"]


def test_clients_that_vanish_leave_nothing_behind(server: Server) -> None:
    over = threading.Event()
    server.state.engine.submit(lambda work: over.wait(120), "Reading")
    before = server.state.counters.answered
    for stream in (True, False) * 10:
        body = {"messages": said("Never mind."), "stream": stream, "max_tokens": 500}
        with pytest.raises(httpx.TimeoutException):
            server.http.post("/v1/chat/completions", json=body, timeout=0.05)
    over.set()
    server.until_idle()
    assert server.state.counters.answered == before
    made = server.http.post("/v1/chat/completions", json={"messages": said("Hello?")})
    assert made.json()["choices"][0]["message"]["content"]


def test_a_system_prompt_of_the_server_is_for_chats_without_one(
    settings: Settings, tmp_path: Path, reference: Any
) -> None:
    system = {"role": "system", "content": "Be brief."}
    given = settings.replace({"system": "Be brief."})
    with serving(given, ServerConfig(folder=tmp_path)) as server:
        for messages in (said("Hi"), [{**system, "content": "Be long."}, *said("Hi")]):
            made = server.http.post("/v1/chat/completions", json={"messages": messages}).json()
            whole = messages if len(messages) > 1 else [system, *messages]
            assert made["choices"][0]["message"]["content"] == expected(reference, whole)
