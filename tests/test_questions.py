"""The runner of question tasks: what every branch gets is what it would get alone."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from kvlite.bench.batch_decode import answers, surprise
from kvlite.bench.case import Case, Recipe
from kvlite.bench.fork import Choice, Recalled, parties
from kvlite.bench.niah import Niah
from kvlite.bench.questions import QuestionRow, ask, read
from kvlite.bench.rows import tallies
from kvlite.bench.task import measure
from kvlite.cache import KVBits, KVCache
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.step import decode_step
from kvlite.methods import parse_method

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
        context=tuple(ids[:context]),
        question=tuple(ids[context : context + question]),
        keys=(str(forced[2]), f"{forced[4]} {forced[5]}"),
        words=words,
        forced=tuple(forced),
        at_keys=(2, 4, 5),
        new_tokens=8,
    )


def recipes(seeds: Sequence[int]) -> list[Recipe]:
    return [
        Recipe("made", "up", 102, 0.5, seed, lambda _, seed=seed: make_case(seed)) for seed in seeds
    ]


@pytest.mark.cases(1, 6)
@pytest.mark.parametrize("question", ["known", "unknown"])
def test_forked_branches_answer_as_conversations_do(kind: Tiny, question: str) -> None:
    """Known: one turn. Unknown: the context is read, then the question is a turn of its own."""
    case, model = make_case(), kind.model
    branches = read(model, case, question, CHOICES)
    before = [(branch.cache.entries_mean, branch.cache.nbytes) for branch in branches]
    said = answers(model, branches, case.new_tokens)
    for (spec, budget), branch, held, ids in zip(SPECS, branches, before, said, strict=True):
        talk = Conversation(
            model, Settings(method=spec, budget=str(budget), max_new_tokens=8, recall="off")
        )
        given = case.prompt
        if question == "unknown":
            talk.read(case.context)
            given = list(case.question)
        pieces = talk.stream_tokens(given)
        first = next(pieces)
        metrics = first.metrics
        assert (metrics.kept_entries_mean, metrics.kv_bytes) == held, spec
        alone = [first.token_id, *(piece.token_id for piece in pieces)]
        assert ids == [token for token in alone if token not in model.stop_ids], spec
        assert branch.cache.seen == talk.cache.seen


WAYS = [Recalled(0), Recalled(20), Recalled(20, KVBits(8, 8))]


def test_parties_share_a_tier_and_only_one_is_filled_at_a_time() -> None:
    """Choices without recall go with those that read like them."""
    eight = Recalled(20, KVBits(8, 8))
    grid = [
        Choice(parse_method("kvzip"), 40),
        Choice(parse_method("kvzip"), 40, None, WAYS[0]),
        Choice(parse_method("snapkv"), 40, None, WAYS[0]),
        Choice(parse_method("pyramidinfer"), 40, None, WAYS[0]),
        Choice(parse_method("pyramidinfer"), 40, None, WAYS[1]),
        Choice(parse_method("pyramidinfer"), 60, None, WAYS[1]),
        Choice(parse_method("h2o"), 40, None, WAYS[1]),
        Choice(parse_method("h2o"), 40, None, eight),
        Choice(parse_method("tova"), 40),
    ]
    expected = [[0, 2, 6, 8], [1], [3, 4], [5], [7]]
    assert parties(grid) == [[grid[index] for index in party] for party in expected]
    assert parties(grid[:1]) == [grid[:1]]


def alone(tiny: Tiny, case: Case, choice: Any) -> float:
    """Surprise by decode steps of one method by itself."""
    (branch,) = read(tiny.model, case, "known", [choice])
    logits, nats = branch.logits[None], []
    for at, token in enumerate(case.forced):
        if at in case.at_keys:
            nats.append(-float(logits.log_softmax(-1)[0, token]))
        logits = decode_step(tiny.model, branch.cache, torch.tensor([token]), branch.policies)
    return sum(nats) / len(nats)


@pytest.mark.cases(1, 4)
def test_surprise_is_each_methods_own_and_disturbs_nothing(kind: Tiny) -> None:
    case = make_case(3)
    branches = read(kind.model, case, "known", CHOICES)
    before = [positions(branch.cache) for branch in branches]
    ours = surprise(kind.model, branches, case.forced, case.at_keys)
    for choice, nats in zip(CHOICES, ours, strict=True):
        assert nats == pytest.approx(alone(kind, case, choice), abs=1e-4), choice.method.spec
    distinct = {round(nats, 5) for nats in ours}
    assert len(distinct) > 4 or not kind.model.shape.full_layers
    for branch, held in zip(branches, before, strict=True):
        assert positions(branch.cache) == held
        assert branch.cache.seen == len(case.prompt)
    told = answers(kind.model, branches, 8)
    untold = answers(kind.model, read(kind.model, case, "known", CHOICES), 8)
    assert told == untold


def positions(cache: KVCache) -> list[Any]:
    return [
        (head_group.heads, head_group.positions[..., : head_group.used].tolist())
        for layer in cache.layers
        for head_group in layer.head_groups
    ]


def test_rows_say_what_was_asked_and_what_came(llama: Tiny) -> None:
    case = make_case(2)
    work = ask(llama.model, recipes([2]), [CHOICES[0], CHOICES[2]], ["unknown"])
    full, cut = measure(work)
    said = answers(llama.model, read(llama.model, case, "unknown", [CHOICES[0]]), 8)[0]
    assert full.answer == llama.model.tokenizer.decode(said)
    assert (full.tokens, full.entries_mean, full.question) == (102, 102, "unknown")
    assert (cut.method, cut.budget, cut.entries_mean) == ("snapkv:window=8", 40, 40)
    assert cut.kv_bytes < full.kv_bytes
    keys = {name: asdict(cut)[name] for name in QuestionRow.KEY}
    assert keys == {
        "task": "made", "kind": "up", "length": 102, "depth": 0.5, "seed": 2,
        "question": "unknown", "method": "snapkv:window=8", "budget": 40, "kv_bits": "16",
        "recall": "off",
    }  # fmt: skip


def test_tables_add_up_over_depths_and_seeds() -> None:
    def row(depth: float, hit: bool, budget: int = 64) -> QuestionRow:
        return QuestionRow(
            task="niah", kind="number", length=500, depth=depth, seed=0, question="known",
            method="snapkv", budget=budget, kv_bits="16", tokens=498, entries_mean=64.0,
            kv_bytes=1000, hit=hit, found=float(hit), leading=hit / 2, rouge=0.5,
            surprise=2.0 * hit, answer="",
        )  # fmt: skip

    rows = [row(0, True), row(0, True, 128), row(1, False)]
    first, second = tallies(rows)
    assert (first.rows[0].budget, sum(first.values("hit")), len(first.rows)) == (64, 1, 2)
    assert first.estimate("leading").value == 0.25
    assert (first.estimate("surprise").value, first.estimate("surprise").low) == (1, 0)
    assert (second.rows[0].budget, sum(second.values("hit")), len(second.rows)) == (128, 1, 1)
    one, other = niah().table(rows)
    assert one["all found"] == "1 of 2 (9% to 91%)"
    assert other["surprise"] == "2.00"


def niah() -> Niah:
    grid: dict[str, Any] = {"tokens": [500], "methods": [], "budgets": [64], "kv_bits": ["16"]}
    return Niah(**grid, depths=2, kinds=["number"], question="known", repeats=1)
