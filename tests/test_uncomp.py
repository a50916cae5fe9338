"""UNComp, and head groups of other methods: choices, lines and evictions beside the oracles."""

import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import kvlite
from kvlite.cache import KVSize
from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import layer_policies
from kvlite.methods.scored import Scored
from kvlite.methods.uncomp import UNComp
from kvlite.model.calibration import Calibration
from tests.conftest import Tiny, made_up_calibration, make_tiny
from tests.masked import run_under
from tests.oracles import selection
from tests.oracles.attention import FloatArray
from tests.test_engine import empty, positions
from tests.test_methods import (
    DIM,
    Case,
    kept_positions,
    make_case,
    probabilities,
    shuffled_head_group,
)


def ranked(kv_heads: int) -> Calibration:
    shape = replace(make_tiny("llama").model.shape, kv_sizes=(KVSize(kv_heads, 16),) * 4)
    return made_up_calibration(shape)


def grouped(spec: str, kv_heads: int) -> Scored:
    method = parse_method(spec)
    assert isinstance(method, Scored)
    return replace(method, calibration=ranked(kv_heads))


def oracle_kept(case: Case, b: int, sizes: list[int], window: int) -> list[list[int]]:
    queries, keys, asked, at, scale = case.sequence(b)
    kept = []
    for head, size in enumerate(sizes):
        lines = selection.snapkv(
            queries, keys, asked, at, scale, budget=size, window=window, kernel=7
        )
        kept.append([at[head][slot] for slot in lines[head]])
    return kept


@pytest.mark.parametrize("spec", ["uncomp:window=4", "snapkv:window=4,groups=2"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("kv_heads", "sizes"), [(2, [24, 12]), (3, [21, 21, 10]), (1, [18])])
def test_heads_of_a_group_keep_lines_of_its_size(
    kv_heads: int, sizes: list[int], compressed: bool, spec: str
) -> None:
    case = make_case(kv_heads=kv_heads, batch=2, compressed=compressed)
    method = grouped(spec, kv_heads)
    view = LayerView(0, case.layer.head_groups, case.window, 18)
    kept = kept_positions(method.select(view))
    assert kept == [oracle_kept(case, b, sizes, 4) for b in range(2)]


def test_groups_follow_the_calibration_not_the_order_of_heads() -> None:
    known = replace(ranked(3), head_wins=((0, 2, 0),) * 4, head_ranks=((1.0, 2.0, 3.0),) * 4)
    method = replace(grouped("snapkv:groups=3", 3), calibration=known)
    assert method.head_sizes(1, 30, 9) == [20, 40, 30]


@pytest.mark.parametrize(("size", "window", "kernel"), [(18, 8, 7), (12, 1, 1), (30, 4, 3)])
def test_uncomp_gives_up_the_slot_the_oracle_gives_up(size: int, window: int, kernel: int) -> None:
    batch, heads = 2, 3
    generator = torch.Generator().manual_seed(size)
    head_group = shuffled_head_group(batch, heads, size, 1, rows=window)
    method = UNComp(window=window, pool=kernel)
    seen: deque[FloatArray] = deque(maxlen=window)
    for position in range(size, size + 60):
        row = probabilities((batch, heads, size), generator)
        head_group.record(row)
        seen.append(row.double().numpy())
        total = np.sum(list(seen), axis=0)
        expected = [
            [
                selection.uncomp_victim(
                    head_group.positions[b, h].tolist(), total[b, h].tolist(), window, kernel
                )
                for h in range(heads)
            ]
            for b in range(batch)
        ]
        slots = method.evict(head_group, 1, position)
        assert slots.tolist() == expected
        entry = torch.zeros(batch, heads, 1, DIM)
        head_group.overwrite(slots, entry, entry, position)
        for b, h in np.ndindex(batch, heads):
            for row in seen:
                row[b, h, expected[b][h]] = 0


def most_alike(weights: Tensor, head: int, others: list[int], rows: int, group: int) -> int:
    """By cosine of the last rows of attention, mean over a KV head's queries, with loops."""

    def looks(kv_head: int) -> list[float]:
        own = weights[kv_head * group : (kv_head + 1) * group, -rows:].double()
        return [float(x) for x in own.mean(0).flatten()]

    def cosine(a: list[float], b: list[float]) -> float:
        dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))

    return max(others, key=lambda other: cosine(looks(head), looks(other)))


@pytest.mark.parametrize(("name", "delete"), [("llama-mha", 1), ("llama-mha", 3), ("llama", 1)])
def test_deleted_heads_take_the_output_of_the_most_similar(name: str, delete: int) -> None:
    tiny = make_tiny(name)
    torch.manual_seed(9)
    n, steps = 60, 6
    shape = tiny.model.shape
    method = parse_method(f"uncomp:delete={delete},window=4,groups=1,pool=1")
    method = method.fitted(shape, made_up_calibration(shape))
    ids, cache = torch.randint(3, 199, (1, n)), empty(tiny.model)
    policies = layer_policies(method, shape, n - 1, n)
    logits = prefill(tiny.model, cache, ids, policies, reserve=steps)
    kept = list(range(shape.kv_heads - delete))
    causal = torch.ones(n, n, dtype=torch.bool).tril().repeat(shape.kv_heads, 1, 1)
    weights = run_under(tiny.reference, ids, dict.fromkeys(range(4), causal))[1]
    group = shape.heads // shape.kv_heads
    like = [
        {head: most_alike(layer, head, kept, 4, group) for head in range(len(kept), shape.kv_heads)}
        for layer in weights
    ]
    assert [layer.head_alias for layer in cache.layers] == like
    for layer in cache.layers:
        assert layer.lengths == [(len(kept), n - 1)]
        assert layer.entries_mean == (n - 1) * len(kept) / shape.kv_heads
    held: list[list[list[set[int]]]] = []
    for step in range(steps):
        before = positions(cache)
        token = logits.argmax(-1)
        ids = torch.cat([ids, token[None]], 1)
        logits = decode_step(tiny.model, cache, token, policies)
        after = positions(cache)
        held.append([[*map(set, layer), *[{n + step}] * delete] for layer in after])
        assert len(before[0]) == len(kept)
        count = n + step + 1
        allowed = {}
        for index in range(4):
            mask = torch.ones(count, count, dtype=torch.bool).tril().repeat(shape.kv_heads, 1, 1)
            for at, rows in enumerate(held):
                for head in range(shape.kv_heads):
                    mask[head, n + at] = False
                    mask[head, n + at, sorted(rows[index][head])] = True
            allowed[index] = mask
        dense = run_under(tiny.reference, ids, allowed, like, begin=n)[0][-1]
        assert (logits[0] - dense).abs().max() < 1e-4
    # A later turn goes on with the same heads.
    more = torch.randint(3, 199, (1, 30))
    policies = layer_policies(method, shape, n - 1, cache.seen + 30, new=30)
    prefill(tiny.model, cache, more, policies)
    assert [layer.head_alias for layer in cache.layers] == like
    assert {len(layer) for layer in positions(cache)} == {len(kept)}


def test_what_needs_a_calibration_says_how_to_make_one(llama: Tiny) -> None:
    settings = kvlite.Settings(method="uncomp", budget="40")
    kvlite.Conversation(llama.model, settings)
    with pytest.raises(SettingError, match="kvlite calibrate"):
        kvlite.Conversation(replace(llama.model, calibration=None), settings)
    for spec in ("snapkv:groups=2", "kvx:layers=rank", "uncomp:stage=true"):
        with pytest.raises(SettingError, match=r"kvlite calibrate"):
            parse_method(spec).fitted(llama.model.shape, None)


@pytest.mark.parametrize(
    "spec",
    [
        *("snapkv:window=4,groups=2", "snapkv:window=4,groups=2,low=2", "uncomp:low=4"),
        *("kvx:groups=2", "h2o:groups=2"),
    ],
)
def test_groups_keep_to_the_budget(llama: Tiny, spec: str) -> None:
    for budget in (18, 19, 40, 48):
        settings = kvlite.Settings(method=spec, budget=str(budget))
        talk = kvlite.Conversation(llama.model, settings)
        talk.read(list(range(3, 190)))
        assert budget - 1 < talk.cache.entries_mean <= budget


def test_layers_share_by_their_groups() -> None:
    method = grouped("snapkv:layers=rank,window=4", 2)
    assert method.layer_budgets(4, 100, 1000) == [191, 100, 100, 9]
