"""Storage: true bytes, checked writes, ragged heads."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache, Selection
from kvlite.cache.segment import bytes_held
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


def test_what_layers_share_is_counted_once() -> None:
    segment = halved(5)
    layers = [layer([((0, 1), 2)]).behind([segment], 2) for _ in range(2)]
    own = 2 * 2 * 2 * (2 * 8 * 4 + 4)
    shared = segment.half.nbytes + segment.positions.nbytes
    assert [each.nbytes for each in layers] == [own + shared] * 2
    assert KVCache(layers).nbytes == 2 * own + shared


def test_a_write_past_the_end_is_refused_and_writes_nothing() -> None:
    cache = layer([((0,), 4)])
    fill(cache, 3)
    before = cache.keys.clone()
    with pytest.raises(CapacityError, match="2 entries at slot 3 of a head group of 4"):
        fill(cache, 2)
    assert torch.equal(cache.keys[:, :3], before[:, :3])
    assert cache.head_groups[0].used == 3


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


def test_views_of_one_storage_count_once() -> None:
    """So that weights which were moved together are not counted once for each."""
    whole = torch.zeros(6, 4)
    assert bytes_held([*whole.split(2), whole.T]) == whole.nbytes
    assert bytes_held(torch.zeros(2) for _ in range(3)) == 24
