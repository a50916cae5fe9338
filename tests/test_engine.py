"""Reading and answering: equal to transformers, whatever the architecture, chunk or batch."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVCache
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import ContextError, InterruptedCacheError, Stopped
from kvlite.memory.meter import TensorMeter
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.load import LoadedModel
from tests.conftest import Tiny, make_tiny

FULL = Settings(method="full")


def empty(model: LoadedModel, batch: int = 1) -> KVCache:
    return model.empty_cache(batch)


def run(
    model: LoadedModel,
    cache: KVCache,
    prompt: Tensor,
    steps: int,
    *,
    method: str = "full",
    budget: int = 10**6,
    chunk: int = 20,
) -> tuple[Tensor, Tensor]:
    """Greedy tokens `(batch, steps)` and the logits each came from."""
    n = prompt.shape[1]
    policies = layer_policies(parse_method(method), model.shape, budget, cache.seen + n)
    logits = prefill(model, cache, prompt, policies, reserve=steps, chunk=chunk)
    tokens, rows = [], [logits]
    for _ in range(steps):
        tokens.append(rows[-1].argmax(-1))
        rows.append(decode_step(model, cache, tokens[-1], policies))
    return torch.stack(tokens, 1) if tokens else prompt[:, :0], torch.stack(rows, 1)


def reference_tokens(reference: Any, ids: list[int], count: int) -> list[int]:
    given = torch.tensor([ids])
    with torch.no_grad():
        out = reference.generate(
            given,
            attention_mask=torch.ones_like(given),  # else tokens of padding would not be seen
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return [int(i) for i in out[0, len(ids) :]]


@pytest.mark.cases(5)
def test_logits_of_a_batch_equal_transformers_in_both_turns(tiny: Tiny) -> None:
    torch.manual_seed(2)
    first, second = torch.randint(3, 199, (2, 75)), torch.randint(3, 199, (2, 30))
    cache = empty(tiny.model, batch=2)
    tokens, logits = run(tiny.model, cache, first, 20)
    whole = torch.cat([first, tokens], 1)
    with torch.no_grad():
        expected = tiny.reference(whole).logits
    assert (logits - expected[:, 74:]).abs().max() < 1e-4
    later, logits = run(tiny.model, cache, second, 8)
    whole = torch.cat([whole, second, later], 1)
    with torch.no_grad():
        expected = tiny.reference(whole).logits
    assert (logits - expected[:, 95 + 29 :]).abs().max() < 1e-4


@pytest.mark.cases(3, 10)
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2", "llama4"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 150, 1000])
def test_any_chunk_gives_the_same_logits(name: str, chunk: int) -> None:
    tiny = make_tiny(name)
    torch.manual_seed(3)
    prompt = torch.randint(3, 199, (1, 150))
    with torch.no_grad():
        expected = tiny.reference(prompt).logits[:, -1]
    _, logits = run(tiny.model, empty(tiny.model), prompt, 0, chunk=chunk)
    assert (logits[:, 0] - expected).abs().max() < 1e-5


def positions(cache: KVCache) -> list[list[set[int]]]:
    """What each KV head of each layer holds, in the order of heads."""
    held = []
    for layer in cache.layers:
        lines = {
            head: set(head_group.positions[0, i, : head_group.used].tolist())
            for head_group in layer.head_groups
            for i, head in enumerate(head_group.heads)
        }
        held.append([lines[head] for head in sorted(lines)])
    return held


@pytest.mark.parametrize(
    "method", ["streaming", "snapkv:window=8", "pyramidkv", "kvx", "random", "minicache"]
)
def test_prompts_within_the_budget_are_left_alone(llama: Tiny, method: str) -> None:
    torch.manual_seed(5)
    prompt = torch.randint(3, 199, (3, 40))
    expected_tokens, expected = run(llama.model, empty(llama.model, 3), prompt, 8)
    tokens, logits = run(llama.model, empty(llama.model, 3), prompt, 8, method=method, budget=48)
    assert torch.equal(tokens, expected_tokens)
    assert (logits - expected).abs().max() < 1e-5
    assert torch.equal(logits[:, 0], expected[:, 0])


def test_the_example_reading_shrinks_a_line_step_by_step_to_the_limit(llama: Tiny) -> None:
    cache = empty(llama.model)
    method = "kvx:middle=example,omega=2,limit=32"
    run(llama.model, cache, torch.randint(3, 199, (1, 200)), 0, method=method, budget=32)
    assert cache.entries_mean == 150  # m = 50: sink, stream and middle
    held = cache.nbytes
    cache = empty(llama.model)
    run(llama.model, cache, torch.randint(3, 199, (1, 200)), 30, method=method, budget=32)
    assert cache.entries_mean <= 32
    assert cache.nbytes < held


def test_memory_of_what_was_dropped_is_given_back(llama: Tiny) -> None:
    cache = empty(llama.model)
    run(llama.model, cache, torch.randint(3, 199, (1, 400)), 0, method="snapkv", budget=40)
    shape = llama.model.shape
    assert cache.nbytes == shape.layers * shape.kv_heads * 40 * shape.kv_size.entry_bytes(4)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for layer in cache.layers
        for t in (layer.keys, layer.values, layer.positions)
    }
    assert cache.nbytes == sum(storages.values())


def test_reading_that_is_stopped_leaves_the_conversation_as_it_was(llama: Tiny) -> None:
    talk = Conversation(llama.model, FULL)
    first = list(range(3, 60))
    talk.generate(first, max_new_tokens=4, ignore_eos=True)
    before, seen, stop = positions(talk.cache), talk.cache.seen, threading.Event()
    chunks = 0

    def progress(done: int, total: int) -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 5:
            stop.set()

    with pytest.raises(Stopped):
        talk.generate(
            list(range(3, 90)),
            max_new_tokens=4,
            callbacks=Callbacks(progress=progress, cancel=stop),
            chunk=16,
        )
    assert positions(talk.cache) == before
    assert talk.cache.seen == seen
    stop.clear()
    again = talk.generate([5, 6], max_new_tokens=8, ignore_eos=True)
    fresh = Conversation(llama.model, FULL)
    whole = talk.token_ids[: 1 - len(again.token_ids)]
    assert fresh.generate(whole, max_new_tokens=8, ignore_eos=True).token_ids == again.token_ids


def test_stopping_an_answer_keeps_its_part(llama: Tiny) -> None:
    talk, stop = Conversation(llama.model, FULL), threading.Event()
    pieces = []
    for piece in talk.stream_tokens(
        [5, 6, 7], callbacks=Callbacks(cancel=stop), ignore_eos=True, max_new_tokens=50
    ):
        pieces.append(piece)
        if len(pieces) == 3:
            stop.set()
    assert len(pieces) == 4
    assert pieces[-1].metrics.finish_reason == "interrupted"
    assert talk.token_ids[3:] == [piece.token_id for piece in pieces[:-1]]
    assert len(talk.token_ids) == talk.cache.seen


def test_a_cache_left_half_written_is_not_used_again(llama: Tiny) -> None:
    talk = Conversation(llama.model, FULL)
    talk.generate([5, 6, 7], max_new_tokens=4)
    talk.cache.writing = True
    with pytest.raises(InterruptedCacheError, match="new conversation"):
        talk.generate([8], max_new_tokens=1)


def test_more_than_the_trained_context_is_refused_with_the_numbers(llama: Tiny) -> None:
    talk = Conversation(llama.model, FULL)
    with pytest.raises(ContextError, match=r"1,030 tokens.*1,024"):
        talk.read([5] * 1030)
    assert talk.cache.seen == 0
    talk.read([5] * 1000)
    answer = talk.generate([6] * 20, max_new_tokens=50, ignore_eos=True)
    assert len(answer.token_ids) == 4  # the context holds no more
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("method", ["full", "minicache:start=1"])
def test_a_second_turn_never_holds_the_cache_twice(llama: Tiny, method: str) -> None:
    """Where nothing is cut, layers grow one at a time."""
    model = llama.model
    cache = empty(model)
    run(model, cache, torch.randint(3, 199, (1, 900)), 0, method=method, budget=24)
    held = cache.nbytes
    storages = [t for layer in cache.layers for t in (layer.keys, layer.values, layer.positions)]
    with TensorMeter([*storages, *model.module.parameters()]) as meter:
        del storages
        before = meter.live
        run(model, cache, torch.randint(3, 199, (1, 3)), 0, method=method, budget=24)
    assert meter.peak - before < held / 2


@pytest.mark.long
def test_reading_holds_the_whole_keys_and_values_of_one_layer(llama: Tiny) -> None:
    model = llama.model
    one_layer = model.shape.full_kv_bytes(960, 4) // model.shape.layers
    cache = empty(model)
    with TensorMeter(model.module.parameters()) as meter:
        before = meter.live
        run(
            model, cache, torch.randint(3, 199, (1, 960)), 0, method="streaming", budget=20, chunk=8
        )
    hidden = 960 * model.shape.hidden * 4
    assert one_layer + hidden < meter.peak - before < 1.5 * one_layer + 2 * hidden


@pytest.mark.parametrize("length", [20, 30, 40])
def test_frequencies_are_chosen_by_what_was_read_not_by_the_answers_limit(length: int) -> None:
    """Phi-3's long-context factors begin past 32 tokens here."""
    tiny = make_tiny("phi3-longrope")
    prompt = torch.randint(3, 199, (1, length))
    policies = layer_policies(parse_method("full"), tiny.model.shape, length, length)
    ours = prefill(tiny.model, empty(tiny.model), prompt, policies, reserve=200)
    with torch.no_grad():
        theirs = tiny.reference(prompt).logits[:, -1]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_lines_that_a_layer_cannot_fill_go_to_others(llama: Tiny) -> None:
    """A chat of short turns that grows past twice its budget keeps the whole budget."""
    talk = Conversation(llama.model, Settings(method="kvx", budget="64", max_new_tokens=1))
    for _ in range(40):
        talk.generate([5, 6, 7, 8, 9, 10], ignore_eos=True)
        assert talk.cache.entries_mean == min(64, talk.cache.seen)
    assert talk.cache.seen > 200
