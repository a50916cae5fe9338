"""Fidelity and memory: the yardstick is exact, the others equal naive references."""

import pytest
import torch

from kvlite.bench.fidelity import Fidelity, FidelityRow, fidelity, parts
from kvlite.bench.fork import Choice, read_turns
from kvlite.bench.memory import Memory, MemoryRow, memory
from kvlite.bench.rows import Key, tallies
from kvlite.bench.task import measure
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError
from kvlite.methods import parse_method

from .conftest import Tiny
from .oracles import fidelity as oracle

SPECS = [
    ("full", 90),
    ("random:window=8", 30),
    ("snapkv:window=8", 30),
    ("snapkv:window=8,per_head=true", 30),
    ("kvx:queries=max,heads=max,alpha=16", 30),
    ("h2o", 30),
]
CHOICES = [Choice(parse_method(spec), budget) for spec, budget in SPECS]
LENGTH, AFTER, START = 90, 20, 7


def text() -> list[int]:
    ids = torch.randint(3, 199, (160,), generator=torch.Generator().manual_seed(8))
    return [int(token) for token in ids]


def rows_of(
    tiny: Tiny, starts: tuple[int, ...] = (START,), done: frozenset[Key] = frozenset()
) -> list[FidelityRow]:
    work = fidelity(tiny.model, text(), CHOICES, starts={LENGTH: starts}, after=AFTER)
    return list(measure(work, done))


@pytest.mark.cases(2, 6)
def test_the_full_cache_is_its_own_measure(kind: Tiny) -> None:
    full = rows_of(kind)[0]
    assert (full.kl, full.agreement, full.nll_change, full.scored) == (0, 1, 0, AFTER - 1)
    assert full.attention_kept == pytest.approx(1)


@pytest.mark.cases(1, 5)
def test_distances_are_those_of_decode_steps(kind: Tiny) -> None:
    """Token by token, each method alone, beside transformers' logits of the whole text."""
    part = text()[START : START + LENGTH + AFTER]
    with torch.no_grad():
        full = kind.reference(torch.tensor([part])).logits[0, LENGTH:-1].tolist()
    for row, choice in zip(rows_of(kind), CHOICES, strict=True):
        (branch,) = read_turns(kind.model, [part[:LENGTH]], [choice], reserve=AFTER)
        cache, policies = branch.cache, branch.policies
        assert (row.entries_mean, row.kv_bytes) == (cache.entries_mean, cache.nbytes)
        other = [
            decode_step(kind.model, cache, torch.tensor([token]), policies)[0].tolist()
            for token in part[LENGTH:-1]
        ]
        kl, same, rise = oracle.distances(full, other, part[LENGTH + 1 :])
        assert row.kl == pytest.approx(kl, abs=1e-4), row.method
        assert row.agreement == same
        assert row.nll_change == pytest.approx(rise, abs=1e-4)


@pytest.mark.cases(1, 5)
def test_attention_kept_is_what_transformers_attention_says(kind: Tiny) -> None:
    if not kind.model.shape.full_layers:
        pytest.skip("every layer has a sliding window, whatever the method")
    part = text()[START : START + LENGTH + AFTER - 1]
    with torch.no_grad():
        attentions = kind.reference(torch.tensor([part]), output_attentions=True).attentions
    rows = rows_of(kind)
    for row, choice in zip(rows, CHOICES, strict=True):
        (branch,) = read_turns(kind.model, [part[:LENGTH]], [choice], reserve=AFTER)
        cache = branch.cache
        shares = []
        for index in kind.model.shape.full_layers:
            kept = {
                head: head_group.positions[0, at, : head_group.used].tolist()
                for head_group in cache.layers[index].head_groups
                for at, head in enumerate(head_group.heads)
            }
            by_head = [kept[head] for head in sorted(kept)]
            shares.append(oracle.recall(attentions[index][0].tolist(), by_head, LENGTH))
        assert row.attention_kept == pytest.approx(sum(shares) / len(shares), abs=1e-4), row.method
    assert all(row.attention_kept < 1 for row in rows[1:])


def test_what_is_done_is_left_out(llama: Tiny) -> None:
    starts = (0, START)
    whole = rows_of(llama, starts)
    done = frozenset(tuple(row.to_json()[name] for name in row.KEY) for row in whole[:8])
    assert [*whole[:8], *rows_of(llama, starts, done)] == whole


def test_parts_spread_over_the_text() -> None:
    assert parts(1000, [100, 300], 100, 3, 2000) == {100: [0, 400, 800], 300: [0, 300, 600]}
    assert parts(1000, [100], 100, 1, 2000) == {100: [0]}
    assert parts(201, [100], 100, 9, 2000) == {100: [0, 1]}
    with pytest.raises(
        SettingError, match="--tokens 950 and --after 100 are too many: give up to 1,000"
    ):
        parts(1000, [100, 950], 100, 1, 2000)
    with pytest.raises(
        SettingError, match="--tokens 950 and --after 100 are too many: give up to 1,024"
    ):
        parts(5000, [950], 100, 1, 1024)


GRID = {"tokens": [100], "methods": [], "budgets": [64], "kv_bits": ["16"]}


def test_lines_are_means_over_parts() -> None:
    def row(start: int, kl: float) -> FidelityRow:
        return FidelityRow(
            length=100, start=start, method="snapkv", budget=64, kv_bits="16", scored=9,
            entries_mean=64.0, kv_bytes=1000, index_bytes=24, kl=kl, agreement=0.5,
            nll_change=-0.1, attention_kept=0.9,
        )  # fmt: skip

    rows = [row(0, 0.1), row(5, 0.3)]
    (tally,) = tallies(rows)
    kl = tally.estimate("kl")
    assert (len(tally.rows), kl.value, kl.low) == (2, pytest.approx(0.2), 0)
    (line,) = Fidelity(**GRID, file="", after=9, repeats=2).table(rows)  # type: ignore[arg-type]
    assert (line["parts"], line["attention kept"]) == ("2", "0.900 (0.900 to 0.900)")
    assert tally.kv_bytes == 1024


@pytest.mark.cases(4)
def test_memory_of_full_is_its_arithmetic(kind: Tiny) -> None:
    shape = kind.model.shape
    grid = [CHOICES[0], CHOICES[2]]
    runner = Runner(kind.model, Settings())
    work = memory(runner, text(), grid, lengths=[120])
    full, cut = measure(work)
    entries = [120 if window is None else window.entries(120) for window in shape.windows]
    # Keys and values in float32, and an int32 position, of every entry of every KV head.
    assert full.kv_bytes == sum(
        n * size.heads * ((1 if size.latent else 2) * size.dim * 4 + 4)
        for n, size in zip(entries, shape.kv_sizes, strict=True)
    )
    assert full.full_kv_bytes == shape.full_kv_bytes(120, 4)
    assert full.entries_mean == sum(entries) / len(entries)
    assert full.peak_bytes > full.kv_bytes
    if shape.full_layers:
        assert cut.kv_bytes < full.kv_bytes
    done = frozenset({(120, "full", 90, "16"), (120, "snapkv:window=8", 30, "16")})
    assert not list(measure(work, done))


def test_memory_lines_are_beside_full() -> None:
    def row(length: int, method: str, budget: int, kv_bytes: int, peak: int) -> MemoryRow:
        return MemoryRow(
            length=length, method=method, budget=budget, kv_bits="16", entries_mean=budget,
            kv_bytes=kv_bytes, full_kv_bytes=4000, peak_bytes=peak,
        )  # fmt: skip

    full, cut = row(100, "full", 100, 4096, 8192), row(100, "snapkv", 50, 2048, 6144)
    alone = row(200, "snapkv", 50, 2048, 6144)
    cells = Memory(**GRID).table([full, cut, alone])  # type: ignore[arg-type]
    assert [each["share of full's"] for each in cells] == ["100.0%", "50.0%", "?"]
    assert [each["share of full's peak"] for each in cells] == ["100.0%", "75.0%", "?"]
