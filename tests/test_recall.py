"""The recall tier: turns read as if nothing had ever been dropped."""

import threading
from typing import Any

import pytest
import torch

from kvlite.conversation import Conversation
from kvlite.errors import SettingError, Stopped
from kvlite.methods import METHODS, parse_method
from kvlite.settings import Settings
from tests.conftest import Tiny, make_tiny

from .test_packed import random_ids

EXACT = [name for name in METHODS if parse_method(name).exact and parse_method(name).frees_memory]
COMPOSED = ["simlayerkv+kvx", "snapkv:per_head=true", "uncomp:delete=1", "kvx:layers=global"]


def chat(model: Any, **settings: Any) -> Conversation:
    given = {"recall": "ram", "budget": 40, "max_new_tokens": 9, "chunk": 64, **settings}
    return Conversation(model, Settings(**given))


def logits_of_the_whole(tiny: Tiny, ids: list[int]) -> torch.Tensor:
    """transformers' own, eagerly, after everything."""
    with torch.inference_mode():
        out: torch.Tensor = tiny.reference(torch.tensor([ids]), use_cache=False).logits[:, -1]
    return out


def last_logits(talk: Conversation, ids: list[int]) -> torch.Tensor:
    """After a turn is read; its answer is drawn too."""
    before = [*talk.token_ids, *talk._pending]
    pieces = talk.stream_tokens(ids, ignore_eos=True)
    next(pieces)
    turn = talk._turn
    assert turn is not None
    logits = turn.logits.clone()
    assert talk.token_ids == before + ids
    for _ in pieces:
        pass
    return logits


@pytest.mark.parametrize("name", [*EXACT, *COMPOSED])
@pytest.mark.parametrize("bits", ["16", "4"])
def test_each_turn_begins_as_if_nothing_had_been_dropped(llama: Tiny, name: str, bits: str) -> None:
    talk = chat(llama.model, method=name, kv_bits=bits)
    for turn in range(5):
        ids = random_ids(150 if turn == 0 else 30, turn)[0].tolist()
        logits = last_logits(talk, ids)
        upto = talk.token_ids[: len(talk.token_ids) - 8]
        torch.testing.assert_close(logits, logits_of_the_whole(llama, upto), atol=1e-4, rtol=1e-4)
        assert talk.cache.entries_mean < len(upto) or name in ("minicache", "simlayerkv")


@pytest.mark.parametrize(
    "name", ["gemma3", "mistral-sliding", "phi3-longrope", "llama-rope-dynamic"]
)
def test_windows_are_read_again_where_an_answer_began(name: str) -> None:
    tiny = make_tiny(name)
    talk = chat(tiny.model, method="snapkv:window=8", budget=30)
    for turn in range(4):
        logits = last_logits(talk, random_ids(100 if turn == 0 else 20, turn)[0].tolist())
        upto = talk.token_ids[: len(talk.token_ids) - 8]
        torch.testing.assert_close(logits, logits_of_the_whole(tiny, upto), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "kvzip"])
def test_a_turn_that_is_stopped_leaves_everything_as_it_was(llama: Tiny, name: str) -> None:
    talk, straight = (chat(llama.model, method=name, budget=60) for _ in range(2))
    for each in (talk, straight):
        each.generate(random_ids(150)[0].tolist(), ignore_eos=True)
    cancel = threading.Event()

    def stop(done: int, of: int) -> None:
        if done > of / 2:
            cancel.set()

    with pytest.raises(Stopped):
        talk.read(random_ids(90, 5)[0].tolist(), progress=stop, cancel=cancel)
    assert talk.tier is not None and talk.tier.seen == 150
    for seed in (1, 2):
        more = random_ids(40, seed)[0].tolist()
        answers = [each.generate(more, ignore_eos=True).token_ids for each in (talk, straight)]
        assert answers[0] == answers[1]


def test_a_tier_begins_when_something_is_about_to_be_dropped(llama: Tiny) -> None:
    talk = chat(llama.model, method="snapkv", budget=170)
    talk.generate(random_ids(150)[0].tolist(), ignore_eos=True)
    assert talk.tier is None and talk.cache.entries_mean == 158
    ids = random_ids(60, 3)[0].tolist()
    logits = last_logits(talk, ids)
    assert talk.tier is not None and talk.tier.seen == 219
    upto = talk.token_ids[:219]
    torch.testing.assert_close(logits, logits_of_the_whole(llama, upto), atol=1e-4, rtol=1e-4)


def test_reading_without_answers_forgets_nothing(llama: Tiny) -> None:
    talk = chat(llama.model, method="kvx", budget=30)
    parts = [random_ids(count, count)[0].tolist() for count in (100, 1, 70)]
    for part in parts:
        talk.read(part)
    logits = last_logits(talk, [7, 8])
    whole = logits_of_the_whole(llama, [*parts[0], *parts[1], *parts[2], 7, 8])
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("bits", "most"), [("8", 0.02), ("4", 0.3)])
def test_a_tier_in_few_bits_is_nearly_exact_and_small(llama: Tiny, bits: str, most: float) -> None:
    talk, exact = (chat(llama.model, budget=40, recall_bits=each) for each in (bits, "16"))
    for turn in range(3):
        ids = random_ids(400 if turn == 0 else 30, turn)[0].tolist()
        logits = last_logits(talk, ids)
        upto = talk.token_ids[: len(talk.token_ids) - 8]
        whole = logits_of_the_whole(llama, upto)
        assert 0 < (logits - whole).std() < most * whole.std()
        exact.generate(ids, max_new_tokens=1)
    assert talk.tier is not None and exact.tier is not None
    assert talk.tier.nbytes < (0.5 if bits == "8" else 0.35) * exact.tier.nbytes


def test_a_tier_holds_what_was_read_and_no_more(llama: Tiny) -> None:
    talk = chat(llama.model, method="snapkv", budget=40)
    talk.read(random_ids(500)[0].tolist())
    shape = llama.model.shape
    entry = shape.kv_heads * (2 * 4 * shape.head_dim + 4)
    assert talk.tier is not None and talk.tier.nbytes == shape.layers * 500 * entry
    answer = talk.generate([5, 6], ignore_eos=True)
    assert answer.ledger.tier_bytes == talk.tier.nbytes <= shape.layers * 570 * entry
    assert " in RAM" in answer.ledger.line()


def test_recall_is_refused_where_it_cannot_be(llama: Tiny) -> None:
    with pytest.raises(SettingError, match="lminfinite never looks at what is out of its sight"):
        chat(llama.model, method="lminfinite").read([5] * 50)
    talk = chat(llama.model, recall="off")
    talk.read([5] * 90)
    with pytest.raises(SettingError, match="cannot begin now: of the 90 tokens"):
        talk.generate([6], recall="ram")
    full = chat(llama.model, method="full")
    full.read([5] * 90)
    assert full.tier is None
    talk = chat(llama.model)
    talk.read([5] * 90)
    talk.generate([6], recall="off", max_new_tokens=1)
    assert talk.tier is None
