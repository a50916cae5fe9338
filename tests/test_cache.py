"""Storage: true bytes, checked writes, ragged heads."""

import pytest
import torch

from kvlite.cache import KVCache, LayerCache, Selection
from kvlite.engine.decode import LayerStep
from kvlite.engine.prefill import LayerReader
from kvlite.errors import CapacityError
from kvlite.methods import parse_method
from kvlite.methods.base import LayerView
from kvlite.methods.rules import Rule
from kvlite.methods.scores import Window


def layer(sizes: list[tuple[tuple[int, ...], int]], batch: int = 2, rows: int = 0) -> LayerCache:
    return LayerCache(
        sizes,
        batch=batch,
        dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        decode_rows=rows,
    )


UNUSED = (torch.empty(0), torch.empty(0))  # a rotation, where nobody looks at it


def fill(cache: LayerCache, count: int) -> None:
    for bank in cache.banks:
        entries = torch.randn(bank.keys.shape[0], len(bank.heads), count, 8)
        bank.append(entries, entries + 1, torch.arange(bank.used, bank.used + count))


def test_heads_with_different_budgets_take_only_their_own_slots() -> None:
    ragged = layer([((0, 2), 10), ((1,), 3)], batch=1)
    assert ragged.keys.shape == (1, 23, 8)
    assert ragged.nbytes == 23 * (2 * 8 * 4 + 4)


def test_banks_are_views_of_the_flat_storage() -> None:
    cache = layer([((0, 2), 10), ((1,), 3)])
    fill(cache, 3)
    flat = cache.keys.untyped_storage().data_ptr()
    assert all(bank.keys.untyped_storage().data_ptr() == flat for bank in cache.banks)
    assert torch.equal(cache.keys[:, 20:23], cache.banks[1].keys[:, 0])


def test_a_write_past_the_end_is_refused_and_writes_nothing() -> None:
    cache = layer([((0,), 4)])
    fill(cache, 3)
    before = cache.keys.clone()
    with pytest.raises(CapacityError, match="2 entries at slot 3 of a bank of 4"):
        fill(cache, 2)
    assert torch.equal(cache.keys[:, :3], before[:, :3])
    assert cache.banks[0].used == 3


def test_overwriting_while_there_is_room_is_refused() -> None:
    cache = layer([((0,), 4)])
    fill(cache, 3)
    entry = torch.zeros(2, 1, 1, 8)
    with pytest.raises(CapacityError, match="1 free slots"):
        cache.banks[0].overwrite(torch.zeros(2, 1, dtype=torch.long), entry, entry, 9)


def test_overwriting_replaces_each_heads_own_slot_and_forgets_its_votes() -> None:
    cache = layer([((0, 1), 4)], rows=2)
    fill(cache, 4)
    bank = cache.banks[0]
    bank.record(torch.ones(2, 2, 4))
    slots = torch.tensor([[0, 1], [2, 3]])
    entry = torch.full((2, 2, 1, 8), 7.0)
    bank.overwrite(slots, entry, entry, 9)
    for sequence in range(2):
        for head in range(2):
            slot = int(slots[sequence, head])
            assert bank.positions[sequence, head, slot] == 9
            assert (bank.keys[sequence, head, slot] == 7).all()
            assert bank.scores()[sequence, head, slot] == 0
            assert bank.scores()[sequence, head].sum() == 3


def test_votes_are_those_of_the_last_rows_only() -> None:
    cache = layer([((0,), 4)], batch=1, rows=2)
    fill(cache, 3)
    for value in (1.0, 10.0, 100.0):
        cache.banks[0].record(torch.full((1, 1, 3), value))
    assert cache.banks[0].scores().tolist() == [[[110.0] * 3]]


def test_resizing_sorts_by_position_and_keeps_votes_with_their_entries() -> None:
    cache = layer([((0,), 3)], batch=1, rows=1)
    fill(cache, 3)
    bank = cache.banks[0]
    bank.record(torch.tensor([[[1.0, 2.0, 3.0]]]))
    entry = torch.full((1, 1, 1, 8), 7.0)
    bank.overwrite(torch.tensor([[0]]), entry, entry, 3)
    bank.record(torch.tensor([[[4.0, 2.0, 3.0]]]))
    grown = cache.resized([5], decode_rows=1).banks[0]
    assert grown.positions[0, 0, :3].tolist() == [1, 2, 3]
    assert grown.scores()[0, 0].tolist() == [2.0, 3.0, 4.0]
    assert (grown.keys[0, 0, 2] == 7).all()
    assert grown.room == 2


def test_gathering_gives_storage_of_its_own() -> None:
    cache = layer([((0, 1), 100)])
    fill(cache, 100)
    bank = cache.banks[0]
    slots = torch.arange(0, 100, 10).expand(2, 2, -1)
    kept = LayerCache.gathered([Selection(bank, slots)], [10])
    assert torch.equal(kept.banks[0].keys, bank.keys[:, :, ::10])
    assert kept.nbytes == cache.nbytes // 10


def test_bytes_of_a_cache_are_the_sum_of_its_storages() -> None:
    layers = [layer([((0, 1), 5)], rows=3), layer([((0,), 7), ((1,), 2)])]
    for each in layers:
        fill(each, 2)
    held = [
        tensor.untyped_storage()
        for each in layers
        for tensor in (each.keys, each.values, each.positions)
    ]
    held += [b.rows.untyped_storage() for each in layers for b in each.banks if b.rows is not None]
    unique = {storage.data_ptr(): storage.nbytes() for storage in held}
    assert KVCache(layers).nbytes == sum(unique.values())


def test_reading_and_answering_over_several_banks_equal_one_bank() -> None:
    """Heads of equal length give the same output however they are banked."""
    torch.manual_seed(0)
    rule = Rule(parse_method("full"), 10**6)
    outs = []
    for sizes in ([((0, 1, 2), 6)], [((1,), 6), ((0, 2), 6)]):
        torch.manual_seed(1)
        start = layer([((0, 1, 2), 6)])
        fill(start, 6)
        bank = start.banks[0]
        all_slots = torch.arange(6).expand(2, 3, -1)
        chosen = [Selection(bank, all_slots[:, : len(heads)], heads) for heads, _ in sizes]
        banked = LayerCache.gathered(chosen, [12] * len(sizes))
        q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
        reader = LayerReader(banked, rule, torch.arange(6, 11, dtype=torch.int32), 11, UNUSED)
        read = reader.attend(q, k, v, 0.3, None)
        step = LayerStep(0, reader.layer, rule, 11, UNUSED)
        told = step.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], 0.3, None)
        outs.append((read, told))
    for one, several in zip(*outs, strict=True):
        assert (one - several).abs().max() < 1e-6


def test_a_cut_leaves_banks_within_the_budget_alone() -> None:
    cache = layer([((0, 2), 20), ((1,), 8)])
    for bank in cache.banks:
        shape = (2, len(bank.heads), bank.capacity, 8)
        bank.append(torch.randn(shape), torch.randn(shape), torch.arange(shape[2]))
    window = Window(torch.randn(2, 3, 1, 8), 19, 3, 1.0)
    view = LayerView(0, cache.banks, window, 10)
    after = Rule(parse_method("streaming"), 10).cut(view, 0)
    held = {head: bank.positions[0, 0].tolist() for bank in after.banks for head in bank.heads}
    assert held[0] == held[2] == [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]
    assert held[1] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_trim_of_one_bank_leaves_the_others() -> None:
    cache = layer([((0,), 20), ((1,), 8)], rows=2)
    for bank in cache.banks:
        shape = (2, 1, bank.capacity, 8)
        bank.append(torch.randn(shape), torch.randn(shape), torch.arange(shape[2]))
    rule = Rule(parse_method("kvx:middle=example,recent=2"), 10)
    after = LayerStep(0, cache, rule, 20, UNUSED).trimmed()
    assert [bank.heads for bank in after.banks] == [(0,), (1,)]
    assert after.banks[0].used < 20 and after.banks[1].used == 8


def test_rewinding_forgets_what_was_appended() -> None:
    cache = layer([((0,), 6)], batch=1, rows=1)
    fill(cache, 3)
    bank = cache.banks[0]
    bank.record(torch.tensor([[[1.0, 2.0, 3.0]]]))
    marks = cache.mark()
    fill(cache, 2)
    bank.record(torch.ones(1, 1, 5))
    cache.rewind(marks)
    assert bank.used == 3
    assert bank.scores()[0, 0].tolist() == [1.0, 2.0, 3.0]


def test_rows_of_another_number_are_not_taken_over() -> None:
    cache = layer([((0,), 3)], batch=1, rows=2)
    fill(cache, 3)
    cache.banks[0].record(torch.ones(1, 1, 3))
    assert cache.resized([3], decode_rows=4).banks[0].scores().sum() == 0
