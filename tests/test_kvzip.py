"""KVzip: what is repeated, what that says of each entry, and what it costs a conversation."""

from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

import kvlite
from kvlite.engine.fork import read_once
from kvlite.engine.rehearsal import BEGIN, GO_ON, MOST_ASKED, REMINDER
from kvlite.errors import SettingError, Stopped
from kvlite.methods import parse_method
from kvlite.settings import Settings
from tests.conftest import Tiny, make_tiny
from tests.oracles.attention import FloatArray
from tests.oracles.rehearsal import repetition_scores
from tests.test_api import held
from tests.test_registry import prompt


def conversation(tiny: Tiny, **settings: Any) -> kvlite.Conversation:
    return kvlite.Runner(tiny.model, Settings().replace(settings)).conversation()


def remembered(talk: kvlite.Conversation) -> list[dict[int, float]]:
    """What each layer that sees everything, and each of its KV heads, remembers of the entries it
    holds, by position."""
    found = []
    for layer in (talk.cache.layers[index] for index in talk.model.shape.full_layers):
        by_head = {}
        for bank in layer.banks:
            for i, head in enumerate(bank.heads):
                at = bank.positions[0, i, : bank.used].tolist()
                by_head[head] = dict(zip(at, bank.scores()[0, i].tolist(), strict=True))
        found += [by_head[head] for head in sorted(by_head)]
    return found


def expected(tiny: Tiny, ids: list[int], passage: int, sinks: int) -> list[FloatArray]:
    """Scores of all tokens by layer, `(kv heads, tokens)`, from transformers' attention."""
    encode, parts = tiny.model.tokenizer.encode, []
    for first in range(0, len(ids), passage):
        before = ids[max(0, first - REMINDER) : first]
        text = GO_ON.format(tiny.model.tokenizer.decode(before)) if first else BEGIN
        span = first, min(first + passage, len(ids))
        row = torch.tensor([ids + encode(text) + ids[slice(*span)]])
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


@pytest.mark.parametrize("passage", [2000, 24])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_entries_remember_the_most_attention_of_a_repetition(name: str, passage: int) -> None:
    tiny, ids = make_tiny(name), prompt(90)
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
        prompt(), max_new_tokens=6, progress=lambda *at: told.append(at), ignore_eos=True
    )
    again = conversation(llama, method="full").generate(prompt(), max_new_tokens=6, ignore_eos=True)
    assert answer.token_ids == again.token_ids
    assert told[-1] == (200 * 4, 200 * 4)  # nothing was repeated


def test_what_an_answer_held_is_repeated_with_the_next_turn(llama: Tiny) -> None:
    ids = prompt(90)
    turns = conversation(llama, method="kvzip:window=4", budget=60)
    answer = turns.generate(ids[:40], max_new_tokens=11, ignore_eos=True).token_ids
    assert turns.cache.rehearsed == 0 and turns.cache.seen == 50
    turns.read(ids[:39])
    assert turns.cache.rehearsed == turns.cache.seen == 90
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
    talk.read(prompt(20), progress=lambda *at: told.append(at))
    asked = len(talk.model.tokenizer.encode(BEGIN))
    assert told[-1] == (4 * (20 + asked + 20),) * 2
    assert told == sorted(told)
    assert talk.cache.entries_mean == 40 and talk.cache.rehearsed == 110
    for old, new in zip(before, remembered(talk), strict=True):
        for at, score in new.items():
            assert score > 0
            if at < 90:
                assert score == old[at]


def test_answering_leaves_what_was_found_alone(llama: Tiny) -> None:
    talk = conversation(llama, method="kvzip:window=4", budget=40)
    talk.read(prompt(90))
    before = remembered(talk)
    talk.generate([7], max_new_tokens=1)
    kept = remembered(talk)
    talk.generate([8], max_new_tokens=8, ignore_eos=True)
    assert before != kept
    for line in remembered(talk):
        assert sum(score == 0 for score in line.values()) == 7


def test_another_method_in_between_begins_anew(llama: Tiny) -> None:
    talk = conversation(llama, method="h2o", budget=40)
    talk.read(prompt(90))
    assert max(max(line.values()) for line in remembered(talk)) > 1
    talk.settings = talk.settings.after_load({"method": "kvzip:window=4"})
    talk.read(prompt(5))
    assert talk.cache.rehearsed == 95
    assert max(max(line.values()) for line in remembered(talk)) <= 1
    talk.settings = talk.settings.after_load({"method": "snapkv:window=4"})
    talk.read(prompt(5))
    assert talk.cache.rehearsed == 0


def test_stopping_while_it_repeats_loses_nothing(llama: Tiny) -> None:
    talk = conversation(llama, method="kvzip:window=4", budget=40)
    talk.read(prompt(90))
    lines, found, cancel = held(talk), remembered(talk), Event()

    def after_the_tokens(done: int, of: int) -> None:
        if done > of // 4 * 2 + 20:
            cancel.set()

    with pytest.raises(Stopped):
        talk.read(prompt(20), progress=after_the_tokens, cancel=cancel)
    assert (held(talk), remembered(talk), talk.cache.rehearsed) == (lines, found, 90)


def test_a_passage_is_no_longer_than_the_model_can_see(llama: Tiny) -> None:
    room = llama.model.shape.max_context
    talk = conversation(llama, method="kvzip:window=4", budget=40)
    talk.read(prompt(room - MOST_ASKED - 100))
    assert talk.cache.entries_mean == 40
    longest = max(
        len(llama.model.tokenizer.encode(text)) for text in (BEGIN, GO_ON.format("1 " * REMINDER))
    )
    assert longest <= MOST_ASKED


def test_a_grid_gives_what_each_gets_alone(llama: Tiny) -> None:
    specs = ["kvzip:window=4", "h2o", "kvzip:pool=3,layers=uniform,window=4", "kvzip:passage=30"]
    choices = [(parse_method(spec), 40) for spec in specs]
    branches = read_once(llama.model, prompt(90), choices, reserve=0)
    for spec, branch in zip(specs, branches, strict=True):
        alone = conversation(llama, method=spec, budget=40)
        alone.read(prompt(90))
        together = conversation(llama)
        together.cache = branch.cache
        assert branch.method.spec == spec
        assert held(together) == held(alone)
        assert branch.cache.rehearsed == alone.cache.rehearsed


def test_lazy_layers_are_repeated_through_too(llama: Tiny) -> None:
    talk = conversation(
        llama, method="simlayerkv:threshold=0,recent=8+kvzip:window=4,layers=uniform", budget=40
    )
    talk.read(prompt(90))
    assert held(talk) == [[*range(4), *range(82, 90)]] * 8
    assert talk.cache.rehearsed == 90


@pytest.mark.parametrize("option", ["sinks=-1", "window=0", "passage=0"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(SettingError, match="out of range"):
        parse_method(f"kvzip:{option}")
