"""Questions one after the other: a row is what a conversation says, and tallies say of what."""

import re
from pathlib import Path

import psutil
import pytest

import kvlite
from kvlite.bench.fork import Choice, Recalled
from kvlite.bench.prose import bundled_prose
from kvlite.bench.rows import tallies
from kvlite.bench.task import measure
from kvlite.bench.turns import Interview, TurnRow, Turns, interview, turns
from kvlite.cache import KVBits
from kvlite.errors import SettingError
from kvlite.methods import parse_method

CHOICES = [
    Choice(parse_method("full"), 400),
    Choice(parse_method("snapkv:window=8"), 60),
    Choice(parse_method("snapkv:window=8"), 60, None, Recalled(0)),
    Choice(parse_method("snapkv:window=8"), 60, None, Recalled(40)),
    Choice(parse_method("h2o"), 60, KVBits(8, 8), Recalled(40, KVBits(4, 4))),
]


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> kvlite.Runner:
    return kvlite.load(str(tiny_folder))


def made(runner: kvlite.Runner, length: int = 400, questions: int = 3, seed: int = 0) -> Interview:
    return interview(runner.tokenizer, bundled_prose(), length, questions, seed)


def test_a_document_holds_each_fact_once_in_order(runner: kvlite.Runner) -> None:
    for seed in (0, 1):
        talk = made(runner, 900, 8, seed)
        pairs = re.findall(r"The code of the (\w+ \w+) is (\d{7})\.", talk.context)
        assert [key for _, key in pairs] == [fact.keys[0] for fact in talk.facts]
        assert len(set(pairs)) == 8
        for index, ((name, key), fact) in enumerate(zip(pairs, talk.facts, strict=True)):
            assert fact.question == f"What is the code of the {name}?"
            place = talk.context.index(key) / len(talk.context)
            assert place == pytest.approx(talk.depth(index), abs=0.2)
        assert [talk.depth(index) for index in (0, 7)] == [1 / 16, 15 / 16]
        first = talk.context + "\n\n" + talk.facts[0].question
        told = [{"role": "user", "content": first}]
        ids = runner.tokenizer.apply_chat_template(told, add_generation_prompt=True)["input_ids"]
        assert 850 < len(ids) <= 900
    assert made(runner, 900, 8, 1) == talk != made(runner, 900, 8, 0)


@pytest.mark.long
def test_rows_are_what_a_conversation_says(runner: kvlite.Runner) -> None:
    talk = made(runner, questions=2)
    rows = list(measure(turns(runner.model, [talk], CHOICES, orders=2)))
    assert len(rows) == 2 * len(CHOICES) * 2
    assert len({tuple(row.to_json()[name] for name in row.KEY) for row in rows}) == len(rows)
    for index, choice in enumerate(CHOICES):
        given = {"method": choice.method.spec, "budget": choice.budget, "kv_bits": choice.kv_bits}
        given["recall"] = "off"
        if choice.recall is not None:
            given |= {"recall": "ram", "recall_entries": choice.recall.entries}
            given["recall_bits"] = "16" if choice.recall.bits is None else "4"
        own = runner.conversation(**given, max_new_tokens=40)
        part = rows[10 + 2 * index : 10 + 2 * index + 2]
        for place, (row, question) in enumerate(zip(part, talk.order(1), strict=True), 1):
            fact = talk.facts[question]
            text = fact.question if place > 1 else f"{talk.context}\n\n{fact.question}"
            pieces = list(own.stream(text))
            assert row.answer == "".join(piece.text for piece in pieces)
            first = pieces[0].metrics
            assert (row.order, row.place, row.depth) == (1, place, talk.depth(question))
            assert (row.method, row.budget) == (choice.method.spec, choice.budget)
            assert (row.kv_bits, row.recall) == (choice.kv_bits, choice.recalls)
            assert (row.kv_bytes, row.entries_mean) == (first.kv_bytes, first.kept_entries_mean)
            assert (row.host_kv_bytes, row.index_bytes) == (first.host_kv_bytes, first.index_bytes)
            assert bool(row.host_kv_bytes) == (choice.recall is not None)
            assert row.tokens == first.seen_tokens
            assert row.hit == (fact.keys[0] in row.answer)
        assert own.cache.seen > 400 + 2 * 15
    assert len({row.answer for row in rows}) > 6


def test_what_cannot_be_asked_is_refused(
    runner: kvlite.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match=r"--tokens 400 is too long: give up to 256 .*1,024"):
        task([400], questions=8).work(runner)
    with pytest.raises(SettingError, match="--tokens 100 is too short for turns of 8 questions"):
        task([200, 100], questions=8).work(runner)
    work = task([400, 200], questions=2).work(runner)
    assert sum(len(keys) for keys, _ in work) == 2 * 2 * len(CHOICES)
    free = psutil.virtual_memory()._replace(available=400_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(SettingError, match=r"recall would take .* of host memory for 592 tokens"):
        task([400], questions=2).work(runner)
    with pytest.raises(SettingError, match=r"recall would take .*what is dropped is forgotten"):
        list(measure(turns(runner.model, [made(runner)], CHOICES[3:4], 1)))


def task(tokens: list[int], questions: int, question: str = "known") -> Turns:
    own = Turns(
        tokens=tokens, methods=[], budgets=[64], kv_bits=["16"], questions=questions, orders=1,
        repeats=1, question=question,
    )  # fmt: skip
    own.choices = CHOICES
    return own


def test_the_table_says_how_many_of_the_full_caches() -> None:
    def row(method: str, order: int, place: int, depth: float, hit: bool) -> TurnRow:
        recall = "off" if method == "full" else "128"
        return TurnRow(
            length=500, seed=0, order=order, place=place, depth=depth, method=method, budget=64,
            kv_bits="16", recall=recall, tokens=600, entries_mean=64.0, kv_bytes=1000,
            index_bytes=24, host_kv_bytes=9, hit=hit, leading=float(hit), answer="",
        )  # fmt: skip

    hits = {"full": (True, True, False, False), "snapkv": (True, False, True, False)}
    rows = [
        row(method, order, place, depth, hit)
        for method, own in hits.items()
        for (order, place, depth), hit in zip(
            [(0, 1, 0.2), (0, 2, 0.8), (1, 1, 0.8), (1, 2, 0.2)], own, strict=True
        )
    ]
    full, cut = task([500], 2).table(rows)
    assert full["answered"].startswith("2 of 4") and full["of the full cache's"] == "2 of 2"
    assert cut["answered"] == "2 of 4 (15% to 85%)"
    assert (cut["of the full cache's"], cut["recall"]) == ("1 of 2", "128")
    assert (full["by order"], full["by place"]) == ("2 0", "1 1")
    assert (cut["by order"], cut["by place"]) == ("1 1", "2 0")
    # Of `full` neither code is answered alike in both orders; of the other neither, likewise.
    assert (full["alike in all orders"], cut["alike in all orders"]) == ("0 of 2", "0 of 2")
    same = [row("snapkv", 0, 1, 0.2, True), row("snapkv", 1, 2, 0.2, True)]
    (line,) = task([500], 2).table(same)
    assert (line["alike in all orders"], line["of the full cache's"]) == ("1 of 1", "0 of 0")
    assert tallies(same)[0].kv_bytes == 1024


@pytest.mark.long
def test_the_second_question_is_answered_with_recall_alone(smollm: kvlite.Runner) -> None:
    """An eighth of the entries held, chosen for the first question."""
    default = parse_method(smollm.settings.method)
    grid = [Choice(default, 64, None, way) for way in (None, Recalled(128))]
    rows = list(measure(turns(smollm.model, [made(smollm, 500, 2)], grid, 1)))
    assert [(row.recall, row.place) for row in rows if row.hit] == [("128", 1), ("128", 2)]
