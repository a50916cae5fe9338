"""Host memory in pieces that CUDA pins, without CUDA."""

import gc

import pytest
import torch

from kvlite.cache import LayerCache
from kvlite.offload.kv import transfer as pinning
from kvlite.offload.kv.transfer import KVTransfer

from .test_recall import full_head_group

HOST = torch.device("cpu")


class Runtime:
    """Pinned memory of which there is so much."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.held: dict[int, int] = {}
        self.largest = 0

    def register(self, address: int, size: int, device: torch.device) -> bool:
        if sum(self.held.values()) + size > self.most:
            return False
        assert all(
            address >= begin + length or address + size <= begin
            for begin, length in self.held.items()
        )
        self.held[address] = size
        self.largest = max(self.largest, size)
        return True

    def release(self, addresses: list[int], device: torch.device) -> None:
        for address in addresses:
            del self.held[address]


def pinning_runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """In CUDA's place."""
    made = Runtime()
    monkeypatch.setattr(pinning, "register", lambda *given: made.register(*given))
    monkeypatch.setattr(pinning, "release", lambda *given: made.release(*given))
    return made


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return pinning_runtime(monkeypatch)


def small_layer() -> LayerCache:
    return LayerCache([((0, 2), 100), ((1,), 60)], batch=1, dim=8, dtype=torch.half, device=HOST)


@pytest.mark.long
def test_pinned_memory_is_taken_in_pieces_and_let_go_of(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "PIECE", 1 << 10)
    layer = small_layer()
    views, size = (
        [layer.head_groups[0].residual_keys, layer.head_groups[1].residual_positions],
        layer.nbytes,
    )
    assert pinning.pin(layer, HOST)
    assert layer.nbytes == sum(runtime.held.values()) == size and runtime.largest == 1 << 10
    assert (
        views[0] is layer.head_groups[0].residual_keys
        and views[1] is layer.head_groups[1].residual_positions
    )
    layer.keys.copy_(torch.arange(260 * 8).view(1, 260, 8))
    assert layer.head_groups[1].residual_keys[0, 0, 0, 0] == 1600
    for tensor in (layer.keys, layer.values, layer.positions):
        begin = tensor.data_ptr()
        assert begin in runtime.held and begin % 4096 == 0
    left = layer.head_groups[0].residual_keys
    del layer, views, tensor
    gc.collect()
    assert sum(runtime.held.values()) == 260 * 8 * 2  # what is seen by a view stays
    del left
    gc.collect()
    assert not runtime.held


def test_where_nothing_can_be_pinned_memory_is_as_ever(runtime: Runtime) -> None:
    runtime.most = 5000  # room for the keys alone
    transfer, layer = KVTransfer(HOST), small_layer()
    transfer.pins = True
    before = [tensor.data_ptr() for tensor in layer.tensors]
    transfer.pin(layer)
    gc.collect()
    assert not transfer.pins and not runtime.held
    assert before == [tensor.data_ptr() for tensor in layer.tensors]
    runtime.most = 1 << 40
    transfer.pin(layer)
    assert not runtime.held  # it is not tried again


@pytest.mark.parametrize("piece", [64, 100, 1 << 20])
def test_no_copy_crosses_from_a_piece_to_the_next(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "PIECE", piece)
    storage = torch.arange(500, dtype=torch.float32)
    flat = storage[33:301]
    parts = list(pinning.pieces(flat))
    assert [at for part in parts for at in range(part.start, part.stop)] == list(range(268))
    for part in parts:
        assert (33 + part.start) * 4 // piece == (33 + part.stop - 1) * 4 // piece
    whole, transfer = full_head_group(70), KVTransfer(HOST)
    source = whole.head_groups[0]
    layer = LayerCache([((0, 1, 2), 90)], batch=1, dim=64, dtype=torch.float32, device=HOST)
    for part in (slice(0, 50), slice(50, 70)):
        given = (each[:, :, part] for each in (source.residual_keys, source.residual_values))
        transfer.append(layer.head_groups[0], *given, source.residual_positions[0, 0, part])
    assert layer.head_groups[0].used == 70
    back = LayerCache(
        [((0, 1, 2), 80)], batch=1, dim=64, dtype=torch.float32, device=HOST
    ).head_groups[0]
    transfer.restore(layer.head_groups[0], back, 66)
    for name in ("residual_keys", "residual_values", "residual_positions"):
        assert getattr(back, name)[:, :, :66].equal(getattr(source, name)[:, :, :66])
