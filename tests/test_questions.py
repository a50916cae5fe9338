"""The runner of question tasks: what every branch gets is what it would get alone."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlite.bench.case import Case, Recipe
from kvlite.bench.questions import (
    QuestionRow,
    ask,
    read_known,
    read_unknown,
    surprise,
    tallies,
)
from kvlite.cache import KVCache
from kvlite.conversation import Conversation
from kvlite.engine import together
from kvlite.engine.decode import decode_step
from kvlite.engine.fork import Choice
from kvlite.engine.together import answers
from kvlite.methods import parse_method
from kvlite.settings import Settings

from .conftest import Tiny

SPECS = [
    ("full", 120),
    ("random:window=8", 40),
    ("snapkv:window=8", 40),
    ("streaming", 30),
    ("kvx:queries=max,heads=max,alpha=16", 40),
    ("kvx:middle=example,omega=8", 40),
    ("h2o", 40),
    ("tova:per_head=true", 40),
    ("snapkv:layers=global,window=8", 50),
    ("simlayerkv:threshold=0.5,recent=30,detect=decode", 60),
]
CHOICES = [Choice(parse_method(spec), budget) for spec, budget in SPECS]


def make_case(seed: int = 0, context: int = 90, question: int = 12) -> Case:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 199, (context + question + 6,), generator=generator).tolist()
    forced = ids[context + question :]
    words = " ".join(map(str, forced))
    return Case(
        task="made",
        kind="up",
        length=context + question,
        depth=0.5,
        seed=seed,
        context=tuple(ids[:context]),
        question=tuple(ids[context : context + question]),
        keys=(str(forced[2]), f"{forced[4]} {forced[5]}"),
        words=words,
        forced=tuple(forced),
        at_keys=(2, 4, 5),
        new_tokens=8,
    )


class Made(Recipe):
    """A recipe whose case is there."""

    def case(self, tokenizer: Any) -> Case:
        return make_case(self.seed)


def recipes(seeds: Sequence[int]) -> list[Recipe]:
    prepare: Any = None
    return [Made("made", "up", 102, 0.5, seed, prepare) for seed in seeds]


@pytest.mark.parametrize("question", ["known", "unknown"])
def test_forked_branches_answer_as_conversations_do(tiny: Tiny, question: str) -> None:
    """Known: one turn. Unknown: the context is read, then the question is a turn of its own."""
    case, model = make_case(), tiny.model
    read = read_known if question == "known" else read_unknown
    branches = read(model, case, CHOICES)
    before = [(branch.cache.entries_mean, branch.cache.nbytes) for branch in branches]
    said = answers(model, branches, case.new_tokens)
    for (spec, budget), branch, held, ids in zip(SPECS, branches, before, said, strict=True):
        talk = Conversation(model, Settings(method=spec, budget=str(budget), max_new_tokens=8))
        given = case.prompt
        if question == "unknown":
            talk.read(case.context)
            given = list(case.question)
        pieces = talk.stream_tokens(given)
        first = next(pieces)
        ledger = first.ledger
        assert (ledger.kept_entries_mean, ledger.kv_bytes) == held, spec
        alone = [first.token_id, *(piece.token_id for piece in pieces)]
        assert ids == [token for token in alone if token not in model.stop_ids], spec
        assert branch.cache.seen == talk.cache.seen


def alone(tiny: Tiny, case: Case, choice: Any) -> float:
    """Surprise by decode steps of one method by itself."""
    (branch,) = read_known(tiny.model, case, [choice])
    logits, nats = branch.logits[None], []
    for at, token in enumerate(case.forced):
        if at in case.at_keys:
            nats.append(-float(logits.log_softmax(-1)[0, token]))
        logits = decode_step(tiny.model, branch.cache, torch.tensor([token]), branch.rules)
    return sum(nats) / len(nats)


def test_surprise_is_each_methods_own_and_disturbs_nothing(tiny: Tiny) -> None:
    case = make_case(3)
    branches = read_known(tiny.model, case, CHOICES)
    before = [positions(branch.cache) for branch in branches]
    ours = surprise(tiny.model, case, branches)
    for choice, nats in zip(CHOICES, ours, strict=True):
        assert nats == pytest.approx(alone(tiny, case, choice), abs=1e-4), choice.method.spec
    distinct = {round(nats, 5) for nats in ours}
    assert len(distinct) > 4 or not tiny.model.shape.full_layers
    for branch, held in zip(branches, before, strict=True):
        assert positions(branch.cache) == held
        assert branch.cache.seen == len(case.prompt)
    told = answers(tiny.model, branches, 8)
    untold = answers(tiny.model, read_known(tiny.model, case, CHOICES), 8)
    assert told == untold


def positions(cache: KVCache) -> list[Any]:
    return [
        (bank.heads, bank.positions[..., : bank.used].tolist())
        for layer in cache.layers
        for bank in layer.banks
    ]


def test_an_answer_ends_where_the_model_ends(llama: Tiny) -> None:
    case = make_case(1)
    choices = CHOICES[:3]
    said = answers(llama.model, read_known(llama.model, case, choices), 8)
    assert [len(ids) for ids in said] == [8, 8, 8]
    stop = frozenset({said[0][3], said[1][0]})
    model = replace(llama.model, stop_ids=stop)
    ended = answers(model, read_known(model, case, choices), 8)
    for ids, short in zip(said, ended, strict=True):
        end = next((i for i, token in enumerate(ids) if token in stop), 8)
        assert short == ids[:end]


def test_rows_say_what_was_asked_and_what_came(llama: Tiny) -> None:
    case = make_case(2)
    (full, cut) = ask(llama.model, recipes([2]), [CHOICES[0], CHOICES[2]], ["unknown"])
    said = answers(llama.model, read_unknown(llama.model, case, [CHOICES[0]]), 8)[0]
    assert full.answer == llama.model.tokenizer.decode(said)
    assert (full.tokens, full.entries_mean, full.question) == (102, 102, "unknown")
    assert (cut.method, cut.budget, cut.entries_mean) == ("snapkv:window=8", 40, 40)
    assert cut.kv_bytes < full.kv_bytes
    keys = {name: asdict(cut)[name] for name in QuestionRow.KEY}
    assert keys == {
        "task": "made", "kind": "up", "length": 102, "depth": 0.5, "seed": 2,
        "question": "unknown", "method": "snapkv:window=8", "budget": 40, "kv_bits": "16",
    }  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 16))
def test_a_run_stopped_after_any_row_goes_on_to_the_same_rows(llama: Tiny, stopped: int) -> None:
    grid = partial(ask, llama.model, recipes([0, 1]), CHOICES[:4], ["known", "unknown"])
    whole = list(grid())
    assert len(whole) == 16
    first = whole[:stopped]
    done = frozenset(tuple(asdict(row)[name] for name in QuestionRow.KEY) for row in first)
    assert [*first, *grid(done)] == whole


def test_what_is_done_is_not_read_again(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = partial(ask, llama.model, recipes([0, 1]), CHOICES[:2], ["known"])
    done = frozenset(tuple(asdict(row)[name] for name in QuestionRow.KEY) for row in grid())
    monkeypatch.setattr(together, "step_together", None)
    monkeypatch.setattr("kvlite.bench.questions.read_known", None)
    assert not list(grid(done))


def test_tallies_add_up_over_depths_and_seeds() -> None:
    def row(depth: float, hit: bool, budget: int = 64) -> QuestionRow:
        return QuestionRow(
            "niah", "number", 500, depth, 0, "known", "snapkv", budget, "16", 498, 64.0, 1000, hit,
            float(hit), hit / 2, 0.5, 2.0 * hit, "",
        )  # fmt: skip

    first, second = tallies([row(0, True), row(0, True, 128), row(1, False)])
    assert (first.budget, first.hits, first.asked, first.leading.value) == (64, 1, 2, 0.25)
    assert (first.surprise.value, first.surprise.low) == (1, 0)
    assert first.cells()["all found"] == "1 of 2 (9% to 91%)"
    assert (second.budget, second.hits, second.asked) == (128, 1, 1)
    assert second.cells()["surprise"] == "2.00"
