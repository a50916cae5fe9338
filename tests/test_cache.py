"""Storage: true bytes, checked writes, ragged heads."""

from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVCache, KVSize, LayerCache, Selection
from kvlite.cache.segment import bytes_held
from kvlite.engine.layer_prefill import LayerPrefill
from kvlite.engine.layer_step import LayerStep
from kvlite.errors import CapacityError
from kvlite.methods import parse_method
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.methods.scores import Window
from kvlite.ops.softmax import Softmax


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
    for head_group in cache.head_groups:
        entries = torch.randn(head_group.keys.shape[0], len(head_group.heads), count, 8)
        head_group.append(
            entries, entries + 1, torch.arange(head_group.used, head_group.used + count)
        )


@dataclass(frozen=True)
class Halved:
    """A segment that holds half of what it gives back."""

    half: Tensor
    positions: Tensor
    start: int = 0
    packed: None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.half, self.positions

    def write_keys(self, out: Tensor) -> None:
        out.copy_(self.half * 2)

    def write_values(self, out: Tensor) -> None:
        out.copy_(self.half * 2 + 1)

    def dot(self, queries: Tensor) -> Tensor:
        return queries @ (self.half * 2).mT

    def weigh(self, weights: Tensor) -> Tensor:
        return weights @ (self.half * 2 + 1)


def halved(entries: int) -> Halved:
    positions = torch.arange(entries, dtype=torch.int32).expand(2, 2, -1).clone()
    return Halved(torch.randn(2, 2, entries, 8), positions)


def behind_a_segment(room: int, rows: int = 0) -> tuple[LayerCache, Halved]:
    segment = halved(5)
    sizes = [((0, 2), 5 + room), ((1,), room)]
    dtype, device = torch.float32, torch.device("cpu")
    segments = [segment, None]
    return LayerCache(
        sizes, batch=2, dim=8, dtype=dtype, device=device, decode_rows=rows, segments=segments
    ), segment


def test_a_bank_behind_a_front_reads_it_first_and_writes_after_it() -> None:
    cache, segment = behind_a_segment(3)
    head_group = cache.head_groups[0]
    assert (head_group.used, head_group.capacity, head_group.room) == (5, 8, 3)
    assert cache.lengths == [(2, 5), (1, 0)] and cache.residual_lengths == [(2, 0), (1, 0)]
    new = torch.randn(2, 2, 3, 8)
    head_group.append(new[:, :, :2], new[:, :, :2] + 1, torch.arange(5, 7))
    assert (head_group.used, head_group.room) == (7, 1)
    assert head_group.keys[:, :, :7].equal(torch.cat([segment.half * 2, new[:, :, :2]], 2))
    assert head_group.values[:, :, :7].equal(head_group.keys[:, :, :7] + 1)
    assert head_group.positions[0, 1, :7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    with pytest.raises(CapacityError, match="2 entries at slot 7 of a head group of 8"):
        head_group.append(new[:, :, :2], new[:, :, :2], torch.arange(7, 9))


def test_overwriting_behind_a_front_replaces_its_own_slots() -> None:
    cache, segment = behind_a_segment(2, rows=1)
    head_group = cache.head_groups[0]
    head_group.append(torch.zeros(2, 2, 2, 8), torch.zeros(2, 2, 2, 8), torch.arange(5, 7))
    head_group.record(torch.ones(2, 2, 7))
    entry = torch.full((2, 2, 1, 8), 7.0)
    head_group.overwrite(torch.tensor([[5, 6], [6, 5]]), entry, entry, 9)
    assert head_group.positions[0].tolist() == [[0, 1, 2, 3, 4, 9, 6], [0, 1, 2, 3, 4, 5, 9]]
    assert (head_group.keys[1, 0, 6] == 7).all() and (head_group.values[1, 1, 5] == 7).all()
    assert head_group.scores()[0].tolist() == [[1.0] * 5 + [0.0, 1.0], [1.0] * 6 + [0.0]]
    assert head_group.keys[:, :, :5].equal(segment.half * 2)
    with pytest.raises(RuntimeError, match="out of bounds"):
        head_group.overwrite(torch.full((2, 2), 4), entry, entry, 10)


def test_growing_keeps_the_front_and_its_rows_and_gathering_writes_it_out() -> None:
    cache, segment = behind_a_segment(3, rows=1)
    for head_group in cache.head_groups:
        new = torch.randn(2, len(head_group.heads), 3, 8)
        head_group.append(new, new + 1, torch.arange(5, 8))
        head_group.record(torch.arange(float(head_group.used)).expand(2, len(head_group.heads), -1))
    grown = cache.resized([20, 6], decode_rows=1)
    assert grown.head_groups[0].segment is segment and grown.computed
    assert [head_group.capacity for head_group in grown.head_groups] == [20, 6]
    written = LayerCache.gathered([Selection.everything(b) for b in cache.head_groups], [8, 3])
    assert not written.computed
    for old, new, out in zip(
        cache.head_groups, grown.head_groups, written.head_groups, strict=True
    ):
        assert new.used == out.used == old.used
        for name in ("keys", "values", "positions"):
            whole = getattr(old, name)[:, :, : old.used]
            assert getattr(new, name)[:, :, : old.used].equal(whole)
            assert getattr(out, name).equal(whole)
        assert new.scores().equal(old.scores())


def test_what_layers_share_is_counted_once() -> None:
    segment = halved(5)
    layers = [layer([((0, 1), 2)]).behind([segment], 2) for _ in range(2)]
    own = 2 * 2 * 2 * (2 * 8 * 4 + 4)
    shared = segment.half.nbytes + segment.positions.nbytes
    assert [each.nbytes for each in layers] == [own + shared] * 2
    assert KVCache(layers).nbytes == 2 * own + shared


def test_heads_with_different_budgets_take_only_their_own_slots() -> None:
    ragged = layer([((0, 2), 10), ((1,), 3)], batch=1)
    assert ragged.keys.shape == (1, 23, 8)
    assert ragged.nbytes == 23 * (2 * 8 * 4 + 4)


def test_banks_are_views_of_the_flat_storage() -> None:
    cache = layer([((0, 2), 10), ((1,), 3)])
    fill(cache, 3)
    flat = cache.keys.untyped_storage().data_ptr()
    assert all(
        head_group.keys.untyped_storage().data_ptr() == flat for head_group in cache.head_groups
    )
    assert torch.equal(cache.keys[:, 20:23], cache.head_groups[1].keys[:, 0])


def test_a_write_past_the_end_is_refused_and_writes_nothing() -> None:
    cache = layer([((0,), 4)])
    fill(cache, 3)
    before = cache.keys.clone()
    with pytest.raises(CapacityError, match="2 entries at slot 3 of a head group of 4"):
        fill(cache, 2)
    assert torch.equal(cache.keys[:, :3], before[:, :3])
    assert cache.head_groups[0].used == 3


def test_overwriting_while_there_is_room_is_refused() -> None:
    cache = layer([((0,), 4)])
    fill(cache, 3)
    entry = torch.zeros(2, 1, 1, 8)
    with pytest.raises(CapacityError, match="1 free slots"):
        cache.head_groups[0].overwrite(torch.zeros(2, 1, dtype=torch.long), entry, entry, 9)


def test_overwriting_replaces_each_heads_own_slot_and_forgets_its_votes() -> None:
    cache = layer([((0, 1), 4)], rows=2)
    fill(cache, 4)
    head_group = cache.head_groups[0]
    head_group.record(torch.ones(2, 2, 4))
    slots = torch.tensor([[0, 1], [2, 3]])
    entry = torch.full((2, 2, 1, 8), 7.0)
    head_group.overwrite(slots, entry, entry, 9)
    for sequence in range(2):
        for head in range(2):
            slot = int(slots[sequence, head])
            assert head_group.positions[sequence, head, slot] == 9
            assert (head_group.keys[sequence, head, slot] == 7).all()
            assert head_group.scores()[sequence, head, slot] == 0
            assert head_group.scores()[sequence, head].sum() == 3


def test_votes_are_those_of_the_last_rows_only() -> None:
    cache = layer([((0,), 4)], batch=1, rows=2)
    fill(cache, 3)
    for value in (1.0, 10.0, 100.0):
        cache.head_groups[0].record(torch.full((1, 1, 3), value))
    assert cache.head_groups[0].scores().tolist() == [[[110.0] * 3]]


def test_resizing_sorts_by_position_and_keeps_votes_with_their_entries() -> None:
    cache = layer([((0,), 3)], batch=1, rows=1)
    fill(cache, 3)
    head_group = cache.head_groups[0]
    head_group.record(torch.tensor([[[1.0, 2.0, 3.0]]]))
    entry = torch.full((1, 1, 1, 8), 7.0)
    head_group.overwrite(torch.tensor([[0]]), entry, entry, 3)
    head_group.record(torch.tensor([[[4.0, 2.0, 3.0]]]))
    grown = cache.resized([5], decode_rows=1).head_groups[0]
    assert grown.positions[0, 0, :3].tolist() == [1, 2, 3]
    assert grown.scores()[0, 0].tolist() == [2.0, 3.0, 4.0]
    assert (grown.keys[0, 0, 2] == 7).all()
    assert grown.room == 2


def test_gathering_gives_storage_of_its_own() -> None:
    cache = layer([((0, 1), 100)])
    fill(cache, 100)
    head_group = cache.head_groups[0]
    slots = torch.arange(0, 100, 10).expand(2, 2, -1)
    kept = LayerCache.gathered([Selection(head_group, slots)], [10])
    assert torch.equal(kept.head_groups[0].keys, head_group.keys[:, :, ::10])
    assert kept.nbytes == cache.nbytes // 10


def test_dropped_heads_follow_the_head_that_takes_their_place() -> None:
    """Through copies and other storage, and where the heads of a group are parted."""
    cache = layer([((0, 1, 2), 4), ((3,), 4)])
    fill(cache, 4)
    left = [Selection.everything(each).without({1: 2, 3: 0}) for each in cache.head_groups]
    assert left[1] is None
    kept = LayerCache.gathered([left[0]], [4])
    slots = torch.arange(4).expand(2, 1, -1)
    parted = [Selection(kept.head_groups[0], slots, (row,)) for row in (0, 1)]
    for made in (
        kept,
        kept.resized([9]),
        kept.empty_like([5]),
        LayerCache.gathered(parted, [4, 4]),
    ):
        assert made.head_alias == {1: 2, 3: 0} and made.kv_heads == 4 and not made.uniform
    assert [each.head_alias for each in made.head_groups] == [{3: 0}, {1: 2}]


def test_bytes_of_a_cache_are_the_sum_of_its_storages() -> None:
    layers = [layer([((0, 1), 5)], rows=3), layer([((0,), 7), ((1,), 2)])]
    for each in layers:
        fill(each, 2)
    held = [
        tensor.untyped_storage()
        for each in layers
        for tensor in (each.keys, each.values, each.positions)
    ]
    held += [
        b.rows.untyped_storage() for each in layers for b in each.head_groups if b.rows is not None
    ]
    unique = {storage.data_ptr(): storage.nbytes() for storage in held}
    assert KVCache(layers).nbytes == sum(unique.values())


def test_reading_and_answering_over_several_banks_equal_one_bank() -> None:
    """Heads of equal length give the same output however they are banked."""
    torch.manual_seed(0)
    policy = LayerPolicy(parse_method("full"), 10**6)
    outs = []
    for sizes in ([((0, 1, 2), 6)], [((1,), 6), ((0, 2), 6)]):
        torch.manual_seed(1)
        start = layer([((0, 1, 2), 6)])
        fill(start, 6)
        head_group = start.head_groups[0]
        all_slots = torch.arange(6).expand(2, 3, -1)
        chosen = [Selection(head_group, all_slots[:, : len(heads)], heads) for heads, _ in sizes]
        banked = LayerCache.gathered(chosen, [12] * len(sizes))
        q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
        reader = LayerPrefill(banked, policy, torch.arange(6, 11, dtype=torch.int32), 11, UNUSED)
        read = reader.attend(q, k, v, Softmax(0.3))
        step = LayerStep(0, reader.layer, policy, 11, UNUSED)
        told = step.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], Softmax(0.3))
        outs.append((read, told))
    for one, several in zip(*outs, strict=True):
        assert (one - several).abs().max() < 1e-6


def test_a_cut_leaves_banks_within_the_budget_alone() -> None:
    cache = layer([((0, 2), 20), ((1,), 8)])
    for head_group in cache.head_groups:
        shape = (2, len(head_group.heads), head_group.capacity, 8)
        head_group.append(torch.randn(shape), torch.randn(shape), torch.arange(shape[2]))
    window = Window(torch.randn(2, 3, 1, 8), 19, 3, Softmax(1.0))
    view = LayerView(0, cache.head_groups, window, 10)
    after = LayerPolicy(parse_method("streaming"), 10).cut(view, 0)
    held = {
        head: head_group.positions[0, 0].tolist()
        for head_group in after.head_groups
        for head in head_group.heads
    }
    assert held[0] == held[2] == [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]
    assert held[1] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_trim_of_one_bank_leaves_the_others() -> None:
    cache = layer([((0,), 20), ((1,), 8)], rows=2)
    for head_group in cache.head_groups:
        shape = (2, 1, head_group.capacity, 8)
        head_group.append(torch.randn(shape), torch.randn(shape), torch.arange(shape[2]))
    policy = LayerPolicy(parse_method("kvx:middle=example,recent=2"), 10)
    after = LayerStep(0, cache, policy, 20, UNUSED).trimmed()
    assert [head_group.heads for head_group in after.head_groups] == [(0,), (1,)]
    assert after.head_groups[0].used < 20 and after.head_groups[1].used == 8


def test_rewinding_forgets_what_was_appended() -> None:
    cache = layer([((0,), 6)], batch=1, rows=1)
    fill(cache, 3)
    head_group = cache.head_groups[0]
    head_group.record(torch.tensor([[[1.0, 2.0, 3.0]]]))
    marks = cache.mark()
    fill(cache, 2)
    head_group.record(torch.ones(1, 1, 5))
    cache.rewind(marks)
    assert head_group.used == 3
    assert head_group.scores()[0, 0].tolist() == [1.0, 2.0, 3.0]


def test_rows_of_another_number_are_not_taken_over() -> None:
    cache = layer([((0,), 3)], batch=1, rows=2)
    fill(cache, 3)
    cache.head_groups[0].record(torch.ones(1, 1, 3))
    assert cache.resized([3], decode_rows=4).head_groups[0].scores().sum() == 0


def test_views_of_one_storage_count_once() -> None:
    """So that weights which were moved together are not counted once for each."""
    whole = torch.zeros(6, 4)
    assert bytes_held([*whole.split(2), whole.T]) == whole.nbytes
    assert bytes_held(torch.zeros(2) for _ in range(3)) == 24


def test_bytes_are_counted_anew_when_a_layer_is_another() -> None:
    size, cpu = KVSize(2, 8), torch.device("cpu")
    cache = KVCache([LayerCache.empty(size, device=cpu, dtype=torch.float32) for _ in range(2)])
    before = cache.nbytes
    cache.layers[1] = cache.layers[1].resized([64])
    assert cache.nbytes == sum(layer.nbytes for layer in cache.layers) > before
    copy = deepcopy(cache)
    copy.layers[1] = copy.layers[0]
    assert copy.nbytes == copy.layers[0].nbytes < cache.nbytes
