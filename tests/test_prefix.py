"""Whole prompts, of which a conversation has read the beginning already."""

import random
from typing import Any

import pytest
import torch

from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import GenerationMetrics
from kvlite.conversation.prefix import CHOOSING, answer_prompt, common, known_ids
from kvlite.errors import ContextError
from tests.conftest import Tiny, make_tiny
from tests.contract.talks import GIVEN, opened

EXACT = ("full", "recall", "recall-8", "recall-disk", "late")


def ids_of(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(3, 199) for _ in range(count)]


def answered(
    talk: Conversation, ids: list[int], **given: Any
) -> tuple[list[int], GenerationMetrics]:
    pieces = [*filter(None, answer_prompt(talk, ids, ignore_eos=True, **given))]
    tokens = [each.token_id for each in pieces if each.token_id is not None]
    return tokens, pieces[-1].metrics


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", EXACT)
def test_whatever_was_read_before_the_answer_is_that_of_the_prompt_alone(
    llama: Tiny, name: str
) -> None:
    talk, chance = opened(llama, **GIVEN[name]), random.Random(7)
    ids = ids_of(150)
    for number in range(10):
        fresh = opened(llama, **GIVEN[name])
        same = common(known_ids(talk), ids)
        found, metrics = answered(talk, ids)
        assert (found, known_ids(talk)) == (answered(fresh, ids)[0], [*ids, *found])
        if name != "recall-8" or number % 3 == 1:  # which is rounded where it stood
            assert metrics.prompt_tokens <= max(len(ids) - same, CHOOSING) + len(found)
        kept = known_ids(talk) if number % 3 == 0 else ids[: chance.randrange(1, len(ids))]
        ids = [*kept, *ids_of(chance.randrange(1, 90), number + 1)]


@pytest.mark.parametrize("name", EXACT)
def test_the_same_prompt_again_reads_only_its_end(llama: Tiny, name: str) -> None:
    talk, ids = opened(llama, **GIVEN[name]), ids_of(150)
    first, _ = answered(talk, ids)
    again, metrics = answered(talk, ids)
    assert again == first
    whole = {"full": 1, "recall-8": len(ids)}
    assert metrics.prompt_tokens == whole.get(name, CHOOSING)


def test_a_sliding_window_goes_back_to_where_a_prompt_ended() -> None:
    tiny, ids = make_tiny("gemma3"), ids_of(150)
    talk, fresh = opened(tiny, method="full"), opened(tiny, method="full")
    found, _ = answered(talk, ids)
    more = [*ids, *found, *ids_of(40, 1)]
    answered(talk, more)
    other = [*ids, *found, *ids_of(20, 2)]
    again, metrics = answered(talk, other)
    assert again == answered(fresh, other)[0]
    assert metrics.prompt_tokens == len(other) - len(ids) - len(found) + 1  # and the pending token
    other = [*ids, *found[:2], *ids_of(20, 3)]  # as if the answer were other tokens as text
    again, metrics = answered(talk, other)
    assert again == answered(fresh, other)[0]
    assert metrics.prompt_tokens == len(other) - len(ids)


@pytest.mark.parametrize("name", ["recall-4", "four bits recalled"])
def test_what_is_rounded_goes_back_to_where_a_prompt_ended(llama: Tiny, name: str) -> None:
    talk, ids = opened(llama, **GIVEN[name]), ids_of(150)
    found, _ = answered(talk, ids)
    other = [*ids, *found[:2], *ids_of(80, 1)]
    again, metrics = answered(talk, other)
    assert metrics.prompt_tokens == 82
    assert again == answered(opened(llama, **GIVEN[name]), other)[0]


@pytest.mark.parametrize("name", ["full", "recall"])
def test_recurrent_layers_go_back_to_where_a_prompt_ended(name: str) -> None:
    tiny, chance = make_tiny("qwen3-next"), random.Random(7)
    talk, ids = opened(tiny, **GIVEN[name]), ids_of(100)
    for number in range(6):
        fresh = opened(tiny, **GIVEN[name])
        found, own = answered(talk, ids)[0], talk.context.turn
        assert found == answered(fresh, ids)[0]
        assert own is not None and fresh.context.turn is not None
        assert torch.allclose(own.logits, fresh.context.turn.logits, atol=1e-4)
        kept = known_ids(talk) if number % 2 == 0 else ids[: chance.randrange(1, len(ids))]
        ids = [*kept, *ids_of(chance.randrange(1, 40), number + 1)]


def test_what_does_not_fit_leaves_the_conversation_as_it_was(llama: Tiny) -> None:
    talk, ids = opened(llama, method="full"), ids_of(100)
    first, _ = answered(talk, ids)
    with pytest.raises(ContextError):
        answered(talk, [*ids, *first, *ids_of(1000)])
    assert known_ids(talk) == [*ids, *first] and len(talk.context.checkpoints) == 1
