"""UNComp, and head groups of other methods: choices, lines and evictions beside the oracles."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvlite
from kvlite.engine.decode import decode_step
from kvlite.engine.prefill import prefill
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.base import LayerView
from kvlite.methods.rules import layer_rules
from kvlite.methods.scored import Scored
from kvlite.methods.uncomp import UNComp
from kvlite.model.calibration import Calibration
from tests.conftest import Tiny, made_up_calibration, make_tiny
from tests.oracles import selection
from tests.oracles.attention import FloatArray
from tests.test_engine import empty
from tests.test_methods import (
    DIM,
    Case,
    kept_positions,
    make_case,
    probabilities,
    shuffled_bank,
)


def ranked(kv_heads: int) -> Calibration:
    shape = replace(make_tiny("llama").model.shape, kv_heads=kv_heads)
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
    view = LayerView(0, case.layer.banks, case.window, 18)
    kept = kept_positions(method.select(view))
    assert kept == [oracle_kept(case, b, sizes, 4) for b in range(2)]


def test_groups_follow_the_calibration_not_the_order_of_heads() -> None:
    method = grouped("uncomp:groups=3", 3)
    known = replace(ranked(3), head_wins=((0, 2, 0),) * 4, head_ranks=((1.0, 2.0, 3.0),) * 4)
    sizes = replace(method, calibration=known).head_sizes(1, 30)
    assert sizes == [20, 40, 30]


@pytest.mark.parametrize(("size", "window", "kernel"), [(18, 8, 7), (12, 1, 1), (30, 4, 3)])
def test_uncomp_gives_up_the_slot_the_oracle_gives_up(size: int, window: int, kernel: int) -> None:
    batch, heads = 2, 3
    generator = torch.Generator().manual_seed(size)
    bank = shuffled_bank(batch, heads, size, 1, rows=window)
    method = UNComp(window=window, pool=kernel)
    seen: deque[FloatArray] = deque(maxlen=window)
    for position in range(size, size + 60):
        row = probabilities((batch, heads, size), generator)
        bank.record(row)
        seen.append(row.double().numpy())
        total = np.sum(list(seen), axis=0)
        expected = [
            [
                selection.uncomp_victim(
                    bank.positions[b, h].tolist(), total[b, h].tolist(), window, kernel
                )
                for h in range(heads)
            ]
            for b in range(batch)
        ]
        slots = method.evict(bank, 1, position)
        assert slots.tolist() == expected
        entry = torch.zeros(batch, heads, 1, DIM)
        bank.overwrite(slots, entry, entry, position)
        for b, h in np.ndindex(batch, heads):
            for row in seen:
                row[b, h, expected[b][h]] = 0


def test_lines_keep_their_length_and_their_window_while_answering(llama: Tiny) -> None:
    torch.manual_seed(8)
    method, cache = grouped("uncomp", 2), empty(llama.model)
    prompt = torch.randint(3, 199, (1, 90))
    rules = layer_rules(method, llama.model.shape, 30, 90)

    prefill(llama.model, cache, prompt, rules, reserve=20)
    for step in range(20):
        decode_step(llama.model, cache, torch.tensor([9]), rules)
        for layer in cache.layers:
            assert sorted(layer.lines) == [(1, 20), (1, 40)]
            for bank in layer.banks:
                held = set(bank.positions[0, 0].tolist())
                assert set(range(90 + step - 7, 90 + step + 1)) <= held


def test_layers_share_by_their_groups() -> None:
    method = grouped("snapkv:layers=rank,window=4", 2)
    assert method.budgets(4, 100, 1000) == [191, 100, 100, 9]
    assert sum(method.budgets(4, 100, 1000)) == 400


def test_what_needs_a_calibration_says_how_to_make_one(llama: Tiny) -> None:
    settings = kvlite.Settings(method="uncomp", budget="40")
    kvlite.Conversation(llama.model, settings)
    with pytest.raises(SettingError, match="kvlite calibrate"):
        kvlite.Conversation(replace(llama.model, calibration=None), settings)
    for spec in ("snapkv:groups=2", "kvx:layers=rank", "uncomp:stage=true"):
        with pytest.raises(SettingError, match=r"kvlite calibrate"):
            parse_method(spec).fitted(llama.model.shape, None)


@pytest.mark.parametrize("spec", ["snapkv:groups=2,per_head=true", "snapkv:groups=2,layers=global"])
def test_groups_and_competition_exclude_each_other(spec: str) -> None:
    with pytest.raises(SettingError, match="groups=2"):
        parse_method(spec)
