"""Entries brought back by kernels, as an entry at a time says: Triton's interpreter on a CPU, the
kernels on a CUDA device."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlite.cache import KVBits, KVHeadGroup
from kvlite.cache.packed import Packed
from kvlite.cache.quantization.hadamard import Hadamard, rotation
from tests.interpreted import DEVICE, kernels
from tests.oracles import quantized
from tests.oracles import recall as oracle

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

FIRST, RECENT, COUNT, CANDIDATES = 2, 5, 13, 40
LIMITS = {"count": COUNT, "candidates": CANDIDATES, "first": FIRST, "recent": RECENT}


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_recall") as module:
        yield module


@pytest.fixture
def small(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers at once, so that all loops go round."""
    for name, size in {"COMPARED": 4, "MOVED": 4, "CHOSEN_FROM": 32}.items():
        monkeypatch.setattr(kernel, name, size)
    candidates = sys.modules["kvlite.ops.triton_candidates"]
    for name, size in {"GROUPS": 32, "SCANNED": 64, "CHOSEN_FROM": 32}.items():
        monkeypatch.setattr(candidates, name, size)


def pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if DEVICE.type == "cuda" else tensor


class Lines:
    """A head group of two sequences whose last slots are free, and all that was read."""

    def __init__(self, heads: tuple[int, ...], rows: int, dim: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(dim)
        shape = 2, len(heads)

        def some(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=random).to(dtype)

        self.heads, self.seen = heads, 150
        self.keys, self.values = (some(2, 4, 170, dim) for _ in range(2))
        self.queries = some(*shape, rows, dim)
        order = torch.rand(*shape, self.seen, generator=random).argsort(-1)[:, :, :20]
        self.held = order.sort(-1).values
        places = self.held[..., None].expand(-1, -1, -1, dim)
        free = torch.zeros(*shape, 3, dim, dtype=dtype)
        self.own = [
            torch.cat([each[:, list(heads)].gather(2, places), free], 2)
            for each in (self.keys, self.values)
        ]
        # In slots that are free, a place that no entry has.
        self.positions = torch.nn.functional.pad(self.held, (0, 3), value=170).int()
        self.rows = torch.ones(*shape, 2, 23)
        self.scores = torch.rand(2, 4, 171, generator=random)
        alike = (self.scores * 4).round() / 4  # of those that are not held
        for row, head in enumerate(heads):
            own = self.scores[:, head].gather(1, self.held[:, row])
            self.scores[:, head] = alike[:, head].scatter(1, self.held[:, row], own)

    def bring_back(self, kernel: ModuleType, seen: int | Tensor, *, writes: bool = True) -> int:
        """How many came."""
        came = torch.tensor(5, device=DEVICE)
        host = [pinned(each) for each in (self.keys, self.values)]
        own, rows = [each.to(DEVICE) for each in (*self.own, self.positions)], self.rows.to(DEVICE)
        kernel.bring_back(
            KVHeadGroup(self.heads, *own, rows),
            None,
            own[2].shape[2],
            0,
            tuple(host),
            self.queries.to(DEVICE),
            0.3,
            self.scores.to(DEVICE),
            seen,
            kernel.Wanted(COUNT, CANDIDATES, FIRST, RECENT),
            came,
            writes=writes,
        )
        *self.own, self.positions = (each.cpu() for each in own)
        self.rows = rows.cpu()
        return int(came) - 5


@pytest.mark.cases(1)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("heads", "rows", "dim", "dtype"),
    [
        ((0, 1), 4, 16, torch.float32),
        ((0, 3), 1, 24, torch.float32),
        ((1,), 7, 80, torch.bfloat16),
        ((3,), 2, 16, torch.float16),
    ],
)
def test_a_token_brings_back_what_it_wants_most(
    kernel: ModuleType,
    small: None,
    heads: tuple[int, ...],
    rows: int,
    dim: int,
    dtype: torch.dtype,
    on_device: bool,
) -> None:
    """What is held is read there: the source's copy of some of it is spoilt."""
    lines = Lines(heads, rows, dim, dtype)
    expected = [
        oracle.lines_after(
            [{*line} for line in lines.held[each].tolist()],
            heads,
            lines.queries[each].double().numpy() * 0.3,
            lines.keys[each, :, : lines.seen].double().numpy(),
            lines.scores[each, :, : lines.seen].numpy(),
            **LIMITS,
        )
        for each in range(2)
    ]
    seen = torch.tensor([lines.seen], device=DEVICE) if on_device else lines.seen
    clean = lines.keys.clone()
    for row, head in enumerate(heads):
        for each in range(2):
            lines.keys[each, head, lines.held[each, row]] = torch.nan
    came, brought = lines.bring_back(kernel, seen), 0
    for each in range(2):
        for row, head in enumerate(heads):
            now, before = lines.positions[each, row].long(), lines.held[each, row]
            assert (now[20:] == 170).all()
            now = now[:20]
            assert len({*now.tolist()}) == 20 and {*now.tolist()} == expected[each][row]
            new = now != before
            brought += int(new.sum())
            assert lines.own[0][each, row, :20].equal(clean[each, head, now])
            assert lines.own[1][each, row, :20].equal(lines.values[each, head, now])
            assert not lines.rows[each, row, :, :20][:, new].any()
            assert (lines.rows[each, row, :, :20][:, ~new] == 1).all()
    assert came == brought > 0


def test_nothing_is_put_anywhere_unless_it_is_to_be(kernel: ModuleType) -> None:
    lines = Lines((0, 1), 2, 16, torch.float32)
    before = [each.clone() for each in (*lines.own, lines.positions, lines.rows)]
    assert lines.bring_back(kernel, lines.seen, writes=False) == 0
    after = *lines.own, lines.positions, lines.rows
    assert all(one.equal(two) for one, two in zip(before, after, strict=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("key_bits", "value_bits", "dim", "group"),
    [(4, 4, 128, 64), (8, 2, 64, 64), (2, 4, 80, 32), (4, 8, 24, 16)],
)
def test_entries_are_rounded_where_others_were(
    kernel: ModuleType, key_bits: int, value_bits: int, dim: int, group: int
) -> None:
    """Of two sequences, two heads in the midst of four: as one vector at a time."""
    from kvlite.ops.triton_pack import pack

    random, shape = torch.Generator().manual_seed(dim), (2, 4, 9, dim)
    keys, values = (
        Hadamard.of(torch.randn(shape, generator=random).to(DEVICE), bits, group)
        for bits in (key_bits, value_bits)
    )
    mean = torch.randn(2, 4, dim, generator=random)
    positions = torch.arange(9, dtype=torch.int32, device=DEVICE).expand(2, 4, -1).clone()
    bits = KVBits(key_bits, value_bits, group, sinks=3)
    # In storage with room for more.
    segment = Packed(keys, values, positions, mean.to(DEVICE), bits).with_room(5)
    storage, keys, values = segment.storage, segment.keys, segment.values
    positions = segment.positions
    assert isinstance(keys, Hadamard) and isinstance(values, Hadamard) and storage is not None
    storage.clear(slice(9, None))
    storage.positions[:, :, 9:] = 0
    before = [each.clone() for each in (*keys.tensors, *values.tensors)]
    source = [torch.randn(2, 2, 40, dim, generator=random) for _ in range(2)]
    # The last of each line are exact slots, or do not count.
    coming = torch.tensor([[30, 31, 32], [33, 34, 35], [36, 37, 38], [20, 21, 22]])
    leaving = torch.tensor([[3, 11, 1], [7, 4, 2], [5, 6, 8], [9, 3, 1]])
    missing = torch.tensor([3, 3, 2, 1])
    lists = (each.int().to(DEVICE) for each in (coming, leaving, missing))
    pack(segment, rotation(dim, DEVICE), 3, slice(1, 3), tuple(map(pinned, source)), *lists)
    went = {
        (line // 2, line % 2 + 1, int(leaving[line, i]) - 3): int(coming[line, i])
        for line in range(4)
        for i in range(int(missing[line]))
        if leaving[line, i] >= 3
    }
    assert len(went) == 7
    beyond = [storage.positions, *storage.keys.tensors[1:], *storage.values.tensors[1:]]
    assert not any(each[..., 9:].any() for each in beyond)
    for at in np.ndindex(2, 4, 9):
        batch, head, place = at
        came = went.get(at)
        assert int(positions[at]) == (place if came is None else came)
        for side, (held, bits, own) in enumerate(
            ((keys, key_bits, source[0]), (values, value_bits, source[1]))
        ):
            codes, scales, zeros = (each.cpu() for each in held.tensors)
            if came is None:
                assert codes[at].equal(before[3 * side].cpu()[at])
                continue
            vector = own[batch, head - 1, came].double()
            vector -= mean[batch, head] if side == 0 else 0
            _, expected, steps = quantized.turned_and_rounded(
                vector.numpy(), bits, dim // held.groups
            )
            assert codes[at].tolist() == quantized.bytes_of(expected, bits)
            assert scales[batch, head, :, place].tolist() == steps[:: dim // held.groups]
            assert zeros[batch, head, :, place].isfinite().all()


@pytest.mark.parametrize("on_device", [False, True])
def test_attention_to_entries_that_leave_is_forgotten(
    kernel: ModuleType, small: None, on_device: bool
) -> None:
    """Of quantized and exact ones, wherever they lie: slots that are free come after each kind."""
    random, heads, start, packed = torch.Generator().manual_seed(5), (0, 3), 2, 9
    keys, values = (torch.randn(1, 4, 170, 16, generator=random) for _ in range(2))
    held = torch.rand(1, 2, 150, generator=random).argsort(-1)[:, :, : 22 + packed].int()
    own, inside = held.split([22, packed], 2)
    free = torch.full((1, 2, 3), 170, dtype=torch.int32)
    bits = KVBits(8, 8, 16, sinks=start)
    mean = torch.zeros(1, 2, 16, device=DEVICE)
    whole = Packed.empty(packed + 3, mean, bits, latent=False)
    whole.clear(slice(None))
    whole.positions.copy_(torch.cat([inside, free], 2))
    segment = whole.first(packed)
    residuals = [torch.zeros(1, 2, 25, 16, device=DEVICE) for _ in range(2)]
    rows = torch.ones(1, 2, 2, 37, device=DEVICE)
    slots = torch.cat([own, free], 2).to(DEVICE)
    group = KVHeadGroup(heads, *residuals, slots, rows, segment=segment, used=31, capacity=37)
    before = group.positions[:, :, : group.used].clone()
    came = torch.tensor(0, device=DEVICE)
    kernel.bring_back(
        group,
        (whole if on_device else segment, rotation(16, DEVICE)),
        25 if on_device else group.residual_len,
        torch.tensor([packed], device=DEVICE) if on_device else packed,
        (pinned(keys), pinned(values)),
        torch.randn(1, 2, 3, 16, generator=random).to(DEVICE),
        0.3,
        torch.rand(1, 4, 171, generator=random).to(DEVICE),
        torch.tensor([150], device=DEVICE) if on_device else 150,
        kernel.Wanted(COUNT, CANDIDATES, FIRST, RECENT),
        came,
    )
    after = group.positions[:, :, : group.used]
    gone = before != after
    quantized_ones = slice(start, start + packed)
    assert gone[:, :, quantized_ones].any() and gone[:, :, quantized_ones.stop :].any()
    assert int(gone.sum()) == int(came)
    expected = (~gone)[:, :, None].expand(-1, -1, 2, -1).float()
    assert rows[..., : group.used].equal(expected) and (rows[..., group.used :] == 1).all()
    assert (slots[:, :, 22:] == 170).all() and (whole.positions[:, :, packed:] == 170).all()
