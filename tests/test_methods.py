"""Every method keeps exactly the entries that the loops in `oracles/selection.py` keep."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache, Selection
from kvlite.methods import METHODS, LayerView, Method, parse_method, scores
from kvlite.methods.kvx import KVX
from kvlite.methods.pyramidkv import PyramidKV
from kvlite.methods.random import Random
from kvlite.methods.scored import over_heads
from kvlite.methods.scores import (
    Pooling,
    Reduce,
    Window,
    pool,
    window_rows,
    window_scores,
)
from kvlite.methods.snapkv import SnapKV
from kvlite.methods.streaming import Streaming
from kvlite.methods.types import Position
from kvlite.ops.softmax import Softmax

from .oracles import budgets, selection
from .oracles.attention import FloatArray, attention_rows

Kept = list[list[list[int]]]
Sizes = Sequence[tuple[int, ...]]
Layout = dict[str, Any]

DIM = 8


@dataclass(frozen=True)
class Case:
    """One layer with all its candidates, and the queries that judge them."""

    layer: LayerCache
    keys: Tensor
    values: Tensor
    positions: Tensor
    window: Window

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        return self.window.queries.shape[1], self.window.kv_heads

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def sequence(self, index: int) -> tuple[FloatArray, FloatArray, list[int], FloatArray, float]:
        """What the oracles take, for one sequence of the batch."""
        return (
            self.window.queries[index].double().numpy(),
            self.keys[index].double().numpy(),
            list(range(self.window.start, self.window.end)),
            self.positions[index].numpy(),
            self.window.softmax.scale,
        )


def make_case(
    *,
    kv_heads: int = 2,
    group: int = 3,
    batch: int = 1,
    n: int = 41,
    rows: int = 6,
    compressed: bool = False,
    split: Sizes | None = None,
    softcap: float | None = None,
    seed: int = 0,
) -> Case:
    """Random keys and queries, scaled so that attention is neither flat nor on one entry.

    A compressed line holds old entries with gaps, other ones in every head and sequence, before
    the tokens just read. Head groups have spare slots full of NaN, which must not be looked at.
    """
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, kv_heads, n, DIM, generator=generator) * 1.5
    queries = torch.randn(batch, kv_heads * group, rows, DIM, generator=generator) * 1.5
    positions = torch.arange(n, dtype=torch.int32).expand(batch, kv_heads, n).clone()
    fresh = rows + 3
    if compressed:
        old, before = n - fresh, 4 * n
        for line in positions.view(-1, n):
            line[:old] = torch.randperm(before, generator=generator)[:old].sort().values
            line[old:] = torch.arange(before, before + fresh)
    heads = split or [tuple(range(kv_heads))]
    layer = make_layer(keys, values, positions, heads, spare=3, decode_rows=1)
    for head_group in layer.head_groups:
        head_group.add(torch.rand(batch, len(head_group.heads), n, generator=generator))
    start = int(positions[0, 0, -1]) + 1 - rows
    window = Window(queries, start, kv_heads, Softmax(DIM**-0.5, softcap))
    return Case(layer, keys, values, positions, window)


def make_layer(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    split: Sizes,
    spare: int = 0,
    decode_rows: int = 0,
) -> LayerCache:
    batch, _, n, dim = keys.shape
    layer = LayerCache(
        [(heads, n + spare) for heads in split],
        batch=batch,
        dim=dim,
        dtype=keys.dtype,
        device=keys.device,
        decode_rows=decode_rows,
    )
    for flat in (layer.keys, layer.values):
        flat.fill_(torch.nan)
    layer.positions.fill_(-1)
    for head_group in layer.head_groups:
        heads = list(head_group.heads)
        head_group.append(
            keys[:, heads], values[:, heads], torch.arange(keys.shape[2], dtype=torch.int32)
        )
        head_group.positions[:, :, :n] = positions[:, heads]
    return layer


def kept_positions(selections: list[Selection]) -> Kept:
    """Positions that a layer holds after the selection: a list a sequence and KV head."""
    after = LayerCache.gathered(selections, [s.slots.shape[2] for s in selections])
    by_head = {
        head: head_group.positions[:, index, : head_group.used].tolist()
        for head_group in after.head_groups
        for index, head in enumerate(head_group.heads)
    }
    lines = [by_head[head] for head in sorted(by_head)]
    return [list(sequence) for sequence in zip(*lines, strict=True)]


def selected(method: Method, case: Case, budget: int, layer: int = 0) -> Kept:
    view = LayerView(layer, case.layer.head_groups, case.window, budget)
    return kept_positions(method.select(view))


def at(case: Case, slots: Kept) -> Kept:
    """Positions of the oracle's slots."""
    return [
        [[int(case.positions[b, h, slot]) for slot in line] for h, line in enumerate(sequence)]
        for b, sequence in enumerate(slots)
    ]


def snapkv_oracle(method: SnapKV, case: Case, budget: int) -> Kept:
    slots = [
        selection.snapkv(
            *case.sequence(b),
            budget,
            method.window,
            method.pool,
            method.pooling,
            method.queries,
            method.heads,
            case.window.softmax.softcap,
        )
        for b in range(case.keys.shape[0])
    ]
    return at(case, slots)


def kvx_oracle(method: KVX, case: Case, budget: int) -> Kept:
    """Votes of the last alpha queries, by default as many as the line holds."""
    case = replace(case, window=case.window.last(method.alpha or budget))
    slots = [
        selection.kvx_prefill(
            *case.sequence(b),
            budget,
            omega=method.omega,
            middle=method.middle,
            until_limit=method.until_limit,
            kernel=method.pool,
            kind=method.pooling,
            over_queries=method.queries,
            over_heads=method.heads,
            per_layer=method.per_layer,
            softcap=case.window.softmax.softcap,
        )
        for b in range(case.keys.shape[0])
    ]
    return at(case, slots)


LAYOUTS = [
    pytest.param(
        {"kv_heads": kv_heads, "group": group, "batch": batch, "compressed": compressed},
        id=f"{kv_heads}x{group}-batch{batch}-{'compressed' if compressed else 'fresh'}",
    )
    for (kv_heads, group), batch, compressed in product(
        [(3, 1), (2, 3), (2, 4)], [1, 2], [False, True]
    )
]
REDUCTIONS = list(product(["sum", "mean", "max"], ["sum", "mean", "max"]))
POOLS = [(1, "max"), (7, "max"), (31, "max"), (7, "avg"), (31, "avg")]

# --- streaming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_streaming_keeps_what_the_oracle_keeps(layout: Layout, sinks: int) -> None:
    case = make_case(**layout, rows=1)
    slots = selection.streaming(case.length, layout["kv_heads"], 15, sinks)
    assert selected(Streaming(sinks), case, 15) == at(case, [slots] * layout["batch"])


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_streaming_rolls_like_a_list(sinks: int) -> None:
    """100 decode steps over slots in any order, against lists of positions."""
    budget, batch, heads = 11, 2, 3
    head_group = shuffled_head_group(batch, heads, budget, 0)
    line = sorted(head_group.positions[0, 0].tolist())
    method = Streaming(sinks)
    for position in range(budget, budget + 100):
        entry = torch.full((batch, heads, 1, DIM), float(position))
        head_group.overwrite(method.evict(head_group, budget, position), entry, entry, position)
        del line[sinks]
        line.append(position)
        assert head_group.positions.sort().values.tolist() == [[line] * heads] * batch
        # The keys moved with the positions.
        fresh = head_group.positions >= budget
        assert torch.equal(head_group.keys[..., 0][fresh], head_group.positions[fresh].float())


# --- SnapKV and PyramidKV ------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [7, 20, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_snapkv_keeps_what_the_oracle_keeps(layout: Layout, budget: int) -> None:
    case = make_case(**layout, seed=1)
    method = SnapKV(window=6)
    assert selected(method, case, budget) == snapkv_oracle(method, case, budget)


@pytest.mark.parametrize(("queries", "heads"), REDUCTIONS)
@pytest.mark.parametrize("compressed", [False, True])
def test_snapkv_reduces_rows_then_heads(queries: str, heads: str, compressed: bool) -> None:
    case = make_case(group=4, compressed=compressed, seed=2)
    method = SnapKV(window=6, queries=queries, heads=heads)  # type: ignore[arg-type]
    assert selected(method, case, 17) == snapkv_oracle(method, case, 17)


@pytest.mark.parametrize(("pool", "pooling"), POOLS)
@pytest.mark.parametrize("n", [24, 41, 42])
def test_snapkv_pools_the_candidates(pool: int, pooling: str, n: int) -> None:
    """Also where the kernel is longer than the line: odd and even numbers of candidates."""
    case = make_case(n=n, seed=3)
    method = SnapKV(window=6, pool=pool, pooling=pooling)  # type: ignore[arg-type]
    assert selected(method, case, 15) == snapkv_oracle(method, case, 15)


@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.parametrize("compressed", [False, True])
def test_snapkv_sees_through_a_soft_cap(softcap: float, compressed: bool) -> None:
    case = make_case(softcap=softcap, compressed=compressed, batch=2, seed=4)
    method = SnapKV(window=6)
    assert selected(method, case, 15) == snapkv_oracle(method, case, 15)


@pytest.mark.parametrize("rows", [1, 3, 6, 11])
def test_snapkv_with_other_than_window_rows(rows: int) -> None:
    """A short question has fewer queries than the window; the engine may hand over more."""
    case = make_case(rows=rows, compressed=True, seed=5)
    method = SnapKV(window=6)
    assert selected(method, case, 15) == snapkv_oracle(method, case, 15)


@pytest.mark.parametrize("queries", ["sum", "mean", "max"])
@pytest.mark.parametrize("elements", [1, 500])
@pytest.mark.parametrize("entries", [1, 7, 35, 41])
def test_scores_in_blocks_of_rows_and_parts_of_entries_are_the_oracles(
    queries: Reduce, elements: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """35 of the 41 entries end within the window's own, which some rows must not see."""
    monkeypatch.setattr(scores, "ELEMENTS_AT_ONCE", elements)
    monkeypatch.setattr(scores, "KEY_ELEMENTS_AT_ONCE", entries * 2 * DIM)
    case = make_case(rows=11, batch=2, compressed=True, softcap=3.0, seed=6)
    ours = window_scores(case.layer.head_groups[0], case.window, queries, "mean")
    for b in range(2):
        expected = selection.window_scores(*case.sequence(b), queries, "mean", softcap=3.0)
        assert np.allclose(ours[b].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("queries", "heads"), REDUCTIONS)
def test_scores_are_the_oracles_numbers(queries: Reduce, heads: Reduce) -> None:
    """Not only in their order, which a mean shares with a sum."""
    case = make_case(group=4, batch=2, compressed=True, softcap=3.0, seed=19)
    ours = window_scores(case.layer.head_groups[0], case.window, queries, heads)
    for b in range(2):
        expected = selection.window_scores(*case.sequence(b), queries, heads, softcap=3.0)
        assert np.allclose(ours[b].numpy(), expected, atol=1e-6)


def test_rows_over_what_was_kept_are_the_oracles_numbers() -> None:
    """Some of the window's own entries dropped: a row must see none of the later ones."""
    case = make_case(group=4, batch=2, rows=8, softcap=3.0, seed=21)
    kept = torch.tensor([0, 3, 9, *range(20, 33), 34, 36, 38, 40])
    picked = Selection(case.layer.head_groups[0], kept.expand(2, 2, -1))
    head_group = LayerCache.gathered([picked], [len(kept)]).head_groups[0]
    ours = window_rows(head_group, case.window)
    for b in range(2):
        queries, keys, asked, positions, scale = case.sequence(b)
        every = attention_rows(queries, keys[:, kept], asked, positions[:, kept], scale, 3.0)
        expected = every.reshape(2, 4, 8, -1).mean(1)
        assert np.allclose(ours[b].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 7, 31])
def test_pooling_gives_the_oracles_numbers(kernel: int, kind: Pooling) -> None:
    """Of lines longer and shorter than the kernel, of odd and even length."""
    generator = torch.Generator().manual_seed(kernel)
    for n in (*range(9), 30, 31, 32, 50):
        values = torch.rand(1, 2, n, generator=generator)
        pooled = pool(values, kernel, kind)
        for line, expected in zip(pooled[0], values[0].tolist(), strict=True):
            assert np.allclose(line.numpy(), selection.pool(expected, kernel, kind), atol=1e-6)


@pytest.mark.parametrize("rounding", ["exact", "official"])
@pytest.mark.parametrize("compressed", [False, True])
def test_pyramidkv_keeps_what_the_oracle_keeps(rounding: str, compressed: bool) -> None:
    method = PyramidKV(window=6, beta=8, rounding=rounding)  # type: ignore[arg-type]
    case = make_case(n=60, compressed=compressed, batch=2, seed=7)
    expected = budgets.pyramid(16, 6, 5, 60, beta=8, rounding=rounding)  # type: ignore[arg-type]
    assert method.layer_budgets(5, 16, 60) == expected
    assert len(set(expected)) == 5
    for layer, budget in enumerate(expected):
        assert selected(method, case, budget, layer) == snapkv_oracle(method, case, budget)


# --- KV-X ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kvx_keeps_what_the_oracle_keeps(layout: Layout, omega: int) -> None:
    case = make_case(**layout, rows=16, seed=10)
    method = KVX(omega=omega)
    assert selected(method, case, 20) == kvx_oracle(method, case, 20)


@pytest.mark.cases(7)
@pytest.mark.parametrize("until_limit", [False, True])
@pytest.mark.parametrize("omega", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("layout", LAYOUTS[2::4])
def test_kvx_example_keeps_what_the_oracle_keeps(
    layout: Layout, omega: int, until_limit: bool
) -> None:
    case = make_case(**layout, rows=16, n=70, seed=11)
    method = KVX(omega=omega, middle="example", until_limit=until_limit)
    assert selected(method, case, 30) == kvx_oracle(method, case, 30)


@pytest.mark.parametrize("budget", [3, 4, 7, 8, 9, 33, 40])
def test_kvx_of_any_line_length(budget: int) -> None:
    for omega in (1, 2, 4):
        case = make_case(rows=9, seed=13)
        method = KVX(omega=omega)
        assert selected(method, case, budget) == kvx_oracle(method, case, budget)


@pytest.mark.parametrize("middle", ["budget", "example"])
@pytest.mark.parametrize("layout", LAYOUTS[::3])
def test_kvx_per_layer_keeps_the_same_slots_in_all_heads(layout: Layout, middle: str) -> None:
    case = make_case(**{**layout, "compressed": False}, rows=12, seed=14)  # type: ignore[arg-type]
    method = KVX(per_layer=True, middle=middle)  # type: ignore[arg-type]
    kept = selected(method, case, 20)
    assert kept == kvx_oracle(method, case, 20)
    assert kept != selected(replace(method, per_layer=False), case, 20)
    assert all(line == lines[0] for lines in kept for line in lines)


@pytest.mark.parametrize("end", [5, torch.tensor([5])])
def test_heads_with_other_lines_share_their_votes_by_position(end: Position) -> None:
    """Positions 0 to 4 and 2 to 4, as earlier turns by other methods leave them."""
    lines, votes = [[0, 1, 2, 3, 4], [2, 4, 3]], [[1.0, 2, 3, 4, 5], [10.0, 30, 20]]
    shared = over_heads(
        [torch.tensor(each)[None, None] for each in votes],
        [torch.tensor(each, dtype=torch.int32)[None, None] for each in lines],
        end,
    )
    assert [each[0, 0].tolist() for each in shared] == [[0.5, 1, 6.5, 12, 17.5], [6.5, 17.5, 12]]


@pytest.mark.parametrize(("pool", "pooling"), POOLS)
@pytest.mark.parametrize("middle", ["budget", "example"])
def test_kvx_pools_the_middle(pool: int, pooling: str, middle: str) -> None:
    case = make_case(rows=12, seed=16)
    method = KVX(pool=pool, pooling=pooling, middle=middle, omega=2)  # type: ignore[arg-type]
    assert selected(method, case, 17) == kvx_oracle(method, case, 17)


@pytest.mark.parametrize("middle", ["budget", "example"])
@pytest.mark.parametrize("alpha", [1, 3])
def test_kvx_votes_with_its_last_alpha_queries_of_a_longer_window(alpha: int, middle: str) -> None:
    """The engine collects the queries of the first votes too, which may be more than alpha."""
    case = make_case(rows=8, seed=18)
    method = KVX(alpha=alpha, middle=middle)  # type: ignore[arg-type]
    expected = kvx_oracle(method, case, 17)
    cached_scores = replace(case, window=case.window.last(alpha))
    assert selected(method, cached_scores, 17) == expected
    assert selected(method, case, 17) == expected


# --- KV-X while decoding -------------------------------------------------------------------------


def shuffled_head_group(batch: int, heads: int, size: int, seed: int, rows: int = 0) -> KVHeadGroup:
    """A full head group of positions 0 .. size - 1, in another slot order in every head."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(size, generator=generator) for _ in range(batch * heads)]
    positions = torch.stack(orders).view(batch, heads, size).int()
    entries = positions[..., None].expand(batch, heads, size, DIM).float()
    layer = make_layer(entries, entries, positions, [tuple(range(heads))], decode_rows=rows)
    return layer.head_groups[0]


def probabilities(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * 2).softmax(-1)


@pytest.mark.parametrize(
    ("budget", "omega", "recent"),
    [(3, 4, 8), (8, 4, 8), (9, 2, 1), (24, 2, 3), (24, 4, 8), (40, 1, 4), (40, 32, 8)],
)
def test_kvx_gives_up_the_slot_the_oracle_gives_up(budget: int, omega: int, recent: int) -> None:
    """100 simulated decode steps, slots in any order."""
    batch, heads = 2, 3
    generator = torch.Generator().manual_seed(budget)
    head_group = shuffled_head_group(batch, heads, budget, 1, rows=recent)
    method = KVX(omega=omega, recent=recent)
    seen: deque[FloatArray] = deque(maxlen=recent)
    positions = head_group.positions.numpy().copy()

    def look() -> None:
        row = probabilities((batch, heads, budget), generator)
        head_group.record(row)
        seen.append(row.double().numpy())

    look()
    for position in range(budget, budget + 100):
        total = np.sum(list(seen), axis=0)
        victims = np.array(
            [
                [
                    selection.kvx_victim(list(positions[b, h]), list(total[b, h]), budget, omega)
                    for h in range(heads)
                ]
                for b in range(batch)
            ]
        )
        slots = method.evict(head_group, budget, position)
        assert slots.tolist() == victims.tolist()
        entry = torch.full((batch, heads, 1, DIM), float(position))
        head_group.overwrite(slots, entry, entry, position)
        for b, h in np.ndindex(batch, heads):
            positions[b, h, victims[b, h]] = position
            for row in seen:
                row[b, h, victims[b, h]] = 0
        assert (head_group.positions.numpy() == positions).all()
        assert torch.equal(head_group.keys[..., 0], head_group.positions.float())
        look()


@pytest.mark.parametrize("omega", [2, 4])
def test_kvx_gives_up_the_first_of_equal_entries(omega: int) -> None:
    """Attention underflows to 0, and before the first row all votes are equal."""
    for seed in range(5):
        head_group = shuffled_head_group(2, 3, 17, seed, rows=2)
        slots = KVX(omega=omega).evict(head_group, 17, 17)
        victims = [
            [selection.kvx_victim(line, [0.0] * 17, 17, omega) for line in lines]
            for lines in head_group.positions.tolist()
        ]
        assert slots.tolist() == victims


@pytest.mark.parametrize("until_limit", [False, True])
@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(("pool", "pooling"), [(1, "max"), (5, "max"), (5, "avg")])
@pytest.mark.parametrize("omega", [1, 2, 4, 16])
def test_kvx_example_trims_as_the_oracle(
    omega: int, pool: int, pooling: str, per_layer: bool, until_limit: bool
) -> None:
    """Slots in any order, votes from two attention rows, a head group with room left."""
    size, limit, heads = 33, 12, 3
    order = shuffled_head_group(1, 1 if per_layer else heads, size, 5).positions
    positions = order.expand(1, heads, size)
    entries = positions[..., None].expand(1, heads, size, DIM).float()
    head_group = make_layer(
        entries, entries, positions, [(0, 1, 2)], spare=4, decode_rows=2
    ).head_groups[0]
    head_group.rows.fill_(torch.nan)  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(omega)
    for _ in range(2):
        head_group.record(probabilities((1, heads, size), generator))
    method = KVX(
        omega=omega,
        middle="example",
        until_limit=until_limit,
        per_layer=per_layer,
        pool=pool,
        pooling=pooling,  # type: ignore[arg-type]
    )
    slots = method.trim(head_group, limit)
    assert slots is not None

    # Attention in proportion to the votes: dot products that are their logarithms, in order.
    ascending = positions.argsort(-1)
    votes = head_group.scores().gather(-1, ascending)[0].double().numpy()
    kept = selection.kvx_prefill(
        np.ones((heads, 1, 1)),
        np.log(votes)[:, :, None],
        [size],
        np.array([range(size)] * heads),
        1.0,
        limit,
        omega=omega,
        middle="example",
        until_limit=until_limit,
        kernel=pool,
        kind=pooling,  # type: ignore[arg-type]
        per_layer=per_layer,
    )
    # Positions are 0 .. size - 1, so they are the oracle's slots.
    assert positions.gather(-1, slots)[0].tolist() == kept


# --- head groups ----------------------------------------------------------------------------------


# --- random --------------------------------------------------------------------------------------


def test_random_keeps_its_window_and_the_right_number() -> None:
    case = make_case(n=60, batch=2, compressed=True)
    for budget in (7, 8, 25, 59):
        kept = selected(Random(window=6), case, budget)
        for b, h in np.ndindex(2, 2):
            line = case.positions[b, h].tolist()
            assert len(kept[b][h]) == budget
            assert kept[b][h][-6:] == line[-6:]
            assert kept[b][h] == sorted(set(kept[b][h]) & set(line))


def test_random_repeats_itself_by_seed_and_layer() -> None:
    case = make_case(n=60, batch=2)
    first = selected(Random(window=6), case, 25)
    assert selected(Random(window=6), case, 25) == first
    assert selected(Random(window=6, seed=1), case, 25) != first
    assert selected(Random(window=6), case, 25, layer=1) != first
    lines = [tuple(line) for sequence in first for line in sequence]
    assert len(set(lines)) == len(lines)


def test_random_draws_evenly() -> None:
    """About half of the candidates from either half of the line."""
    case = make_case(n=206, kv_heads=4, group=1)
    early = [
        sum(position < 100 for position in line)
        for seed in range(20)
        for line in selected(Random(window=6, seed=seed), case, 106)[0]
    ]
    assert abs(np.mean(early) - 50) < 2
    assert min(early) < 50 < max(early)


# --- every method --------------------------------------------------------------------------------


def small(name: str) -> Method:
    """The method by its defaults, with a window that fits these lines."""
    method = METHODS[name]()
    return parse_method(f"{name}:window=6") if "window" in method.defaults() else method


def fills_its_lines(method: Method) -> bool:
    """Whether `select` keeps the budget in every head."""
    return method.compresses and method.respects_budget and not method.variable_head_lens


@pytest.mark.parametrize("layout", LAYOUTS[::5])
@pytest.mark.parametrize(
    "name", [name for name, kind in METHODS.items() if fills_its_lines(kind())]
)
def test_kept_slots_ascend_and_fill_the_budget(name: str, layout: Layout) -> None:
    case = make_case(**layout)
    method = small(name)
    for budget in (max(3, method.min_budget), 20, case.length - 1):
        view = LayerView(1, case.layer.head_groups, case.window, budget)
        for chosen in method.select(view):
            slots = chosen.slots
            assert slots.dtype == torch.int64
            assert slots.shape == (layout["batch"], layout["kv_heads"], budget)
            assert (slots[..., 1:] > slots[..., :-1]).all()
            assert (slots >= 0).all() and (slots < case.length).all()
