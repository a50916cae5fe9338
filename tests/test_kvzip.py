"""KVzip: what is repeated, what that says of each entry, and what it costs a conversation."""

from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

import kvlite
from kvlite.config.settings import Settings
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prefill import prefill
from kvlite.engine.reconstruct import BEGIN, GO_ON, REMINDER
from kvlite.errors import Stopped
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.rotary import rotations_after
from tests.conftest import Tiny, make_tiny
from tests.oracles.attention import FloatArray
from tests.oracles.reconstruction import repetition_scores
from tests.test_api import held
from tests.test_registry import prompt


def conversation(tiny: Tiny, **settings: Any) -> kvlite.Conversation:
    return kvlite.Runner(tiny.model, Settings(recall="off").replace(settings)).conversation()


def remembered(talk: kvlite.Conversation) -> list[dict[int, float]]:
    """What each layer that sees everything, and each of its KV heads, remembers of the entries it
    holds, by position."""
    found = []
    for layer in (talk.cache.layers[index] for index in talk.model.shape.full_layers):
        by_head = {}
        for head_group in layer.head_groups:
            for i, head in enumerate(head_group.heads):
                at = head_group.positions[0, i, : head_group.used].tolist()
                by_head[head] = dict(zip(at, head_group.scores()[0, i].tolist(), strict=True))
        found += [by_head[head] for head in sorted(by_head)]
    return found


def expected(tiny: Tiny, ids: list[int], passage: int, sinks: int) -> list[FloatArray]:
    """Scores of all tokens by layer, `(kv heads, tokens)`, from transformers' attention."""
    encode, parts = tiny.model.tokenizer.encode, []
    for first in range(0, len(ids), passage):
        before = ids[max(0, first - REMINDER) : first]
        asked = [*encode(GO_ON), *before, *encode("\n\n")] if first else encode(BEGIN)
        span = first, min(first + passage, len(ids))
        row = torch.tensor([ids + asked + ids[slice(*span)]])
        with torch.no_grad():
            seen = tiny.reference(row, output_attentions=True).attentions
        parts.append(
            [
                repetition_scores(
                    each[0, :, len(ids) :], len(ids), span, sinks, tiny.model.shape.kv_heads
                )
                for each in seen
            ]
        )
    return [np.concatenate(each, 1) for each in zip(*parts, strict=True)]


def sharp(name: str) -> Tiny:
    """A model whose attention is not flat, so that it matters what it is asked."""
    tiny = make_tiny(name)
    for module in (tiny.reference, tiny.model.module):
        for layer in module.model.layers:
            layer.self_attn.q_proj.weight.data *= 12
    return tiny


@pytest.mark.cases(4)
@pytest.mark.parametrize("passage", [2000, 24])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt-oss"])
def test_entries_remember_the_most_attention_of_a_repetition(name: str, passage: int) -> None:
    tiny, ids = sharp(name), prompt(90)
    talk = conversation(tiny, method=f"kvzip:passage={passage},window=4", budget=40, chunk=32)
    talk.read(ids)
    wanted = expected(tiny, ids, passage, sinks=4)
    shape, found = tiny.model.shape, iter(remembered(talk))
    for layer in shape.full_layers:
        for head in range(shape.kv_heads):
            line = next(found)
            assert 0 < len(line) < 90
            for at, score in line.items():
                assert score == pytest.approx(wanted[layer][head, at], abs=2e-5)


def test_the_best_of_all_layers_and_heads_stay(llama: Tiny) -> None:
    ids = prompt(90)
    talk = conversation(llama, method="kvzip:sinks=2,window=6", budget=30)
    talk.read(ids)
    wanted = np.concatenate(expected(llama, ids, 2000, sinks=2))
    inner = [
        (-score, line, at + 2)
        for line, row in enumerate(wanted[:, 2:84])
        for at, score in enumerate(row)
    ]
    best = {(line, at) for _, line, at in sorted(inner)[: (30 - 8) * len(wanted)]}
    kept = [set(line) for line in remembered(talk)]
    assert kept == [
        {0, 1, *range(84, 90), *(at for own, at in best if own == line)}
        for line in range(len(wanted))
    ]
    assert talk.cache.entries_mean == 30


def test_reading_and_its_first_token_are_exact(llama: Tiny) -> None:
    full = conversation(llama, method="full")
    zipped = conversation(llama, method="kvzip:window=4", budget=12)
    first = full.generate(prompt(), max_new_tokens=1)
    assert zipped.generate(prompt(), max_new_tokens=1).token_ids == first.token_ids
    within = conversation(llama, method="kvzip", budget=500)
    told: list[tuple[int, int]] = []
    answer = within.generate(
        prompt(),
        max_new_tokens=6,
        callbacks=Callbacks(progress=lambda *at: told.append(at)),
        ignore_eos=True,
    )
    again = conversation(llama, method="full").generate(prompt(), max_new_tokens=6, ignore_eos=True)
    assert answer.token_ids == again.token_ids
    assert told[-1] == (200 * 4, 200 * 4)  # nothing was repeated


def test_what_an_answer_held_is_repeated_with_the_next_turn(llama: Tiny) -> None:
    ids = prompt(90)
    turns = conversation(llama, method="kvzip:window=4", budget=60)
    answer = turns.generate(ids[:40], max_new_tokens=11, ignore_eos=True).token_ids
    assert turns.cache.reconstructed == 0 and turns.cache.seen == 50
    turns.read(ids[:39])
    assert turns.cache.reconstructed == turns.cache.seen == 90
    at_once = conversation(llama, method="kvzip:window=4", budget=60)
    at_once.read(ids[:40] + answer + ids[:39])
    assert held(turns) == held(at_once)
    for one, other in zip(remembered(turns), remembered(at_once), strict=True):
        assert one == pytest.approx(other, abs=2e-5)


def test_a_later_turn_repeats_what_is_new_and_keeps_what_was_found(llama: Tiny) -> None:
    talk = conversation(llama, method="kvzip:window=4", budget=40)
    talk.read(prompt(90))
    before = remembered(talk)
    told: list[tuple[int, int]] = []
    talk.read(prompt(20), callbacks=Callbacks(progress=lambda *at: told.append(at)))
    encode = talk.model.tokenizer.encode
    asked = len(encode(GO_ON)) + REMINDER + len(encode("\n\n"))
    assert told[-1] == (4 * (20 + asked + 20),) * 2
    assert told == sorted(told)
    assert talk.cache.entries_mean == 40 and talk.cache.reconstructed == 110
    for old, new in zip(before, remembered(talk), strict=True):
        for at, score in new.items():
            assert score > 0
            if at < 90:
                assert score == old[at]


def test_stopping_while_it_repeats_loses_nothing(llama: Tiny) -> None:
    talk = conversation(llama, method="kvzip:window=4", budget=40)
    talk.read(prompt(90))
    lines, found, cancel = held(talk), remembered(talk), Event()

    def after_the_tokens(done: int, of: int) -> None:
        if done > of // 4 * 2 + 20:
            cancel.set()

    with pytest.raises(Stopped):
        talk.read(prompt(20), callbacks=Callbacks(progress=after_the_tokens, cancel=cancel))
    assert (held(talk), remembered(talk), talk.cache.reconstructed) == (lines, found, 90)


def test_sequences_of_a_batch_are_repeated_each_for_itself() -> None:
    model = sharp("llama").model
    rows = torch.tensor([prompt(90), prompt(180)[90:]])
    method = parse_method("kvzip:window=4,passage=24,layers=uniform")
    found = []
    for batch in (rows, rows[:1], rows[1:]):
        cache = model.empty_cache(len(batch))
        prefill(model, cache, batch, layer_policies(method, model.shape, 40, 90, cache.layers))
        found.append(
            [head_group.scores() for layer in cache.layers for head_group in layer.head_groups]
        )
    together, *alone = found
    for row, each in enumerate(alone):
        for one, other in zip(together, each, strict=True):
            assert torch.allclose(one[row], other[0], atol=1e-5)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-rope-dynamic", "llama"])
def test_a_repetition_is_rotated_as_the_text_was(name: str) -> None:
    """By the frequencies up to the threshold, though it goes beyond."""
    model = make_tiny(name).model
    threshold = 32 if name == "phi3-longrope" else model.shape.max_context
    end = threshold - 12
    (cos, sin), *_ = rotations_after(model, end, 40)
    assert cos.shape[:2] == sin.shape[:2] == (1, 40)
    for made, known in zip((cos, sin), model.rotations(0, threshold)[0], strict=True):
        assert torch.allclose(made[:, :12], known[:, end:], atol=1e-4)
    if name == "llama":
        for made, known in zip((cos, sin), model.rotations(end, 40)[0], strict=True):
            assert torch.allclose(made, known, atol=1e-4)
    else:
        for made, known in zip((cos, sin), model.rotations(end, 40)[0], strict=True):
            assert not torch.allclose(made[:, :12], known[:, :12], atol=1e-2)


def test_a_passage_is_no_longer_than_the_model_can_see(llama: Tiny) -> None:
    room = llama.model.shape.max_context
    asked = len(llama.model.tokenizer.encode(GO_ON)) + REMINDER + 2
    told: list[tuple[int, int]] = []
    talk = conversation(llama, method="kvzip:window=4", budget=40)
    talk.read(prompt(room - asked - 300), callbacks=Callbacks(progress=lambda *at: told.append(at)))
    passages = -(-talk.cache.seen // 300)
    begin = len(llama.model.tokenizer.encode(BEGIN))
    assert told[-1][1] == 4 * (2 * talk.cache.seen + begin + (passages - 1) * (asked - 2))


def test_attention_is_summed_up_anew_after_a_reconstruction(llama: Tiny) -> None:
    talk = conversation(llama, method="kvzip:window=4", budget=40)
    talk.read(prompt(90))
    talk.settings = talk.settings.after_load({"method": "h2o"})
    talk.read(prompt(1))
    assert max(sum(line.values()) for line in remembered(talk)) <= 1.0001  # one token has looked
