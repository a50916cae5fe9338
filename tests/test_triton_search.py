"""An index searched: Triton's interpreter on a CPU, the kernels on a CUDA device."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch

from kvlite.cache.quantization.hadamard import rotation
from kvlite.offload.kv import index as searched
from kvlite.offload.kv.index import Index
from tests.interpreted import DEVICE, kernels
from tests.oracles.recall import expected_attention

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_topk") as module:
        yield module


def index_of(
    batch: int, heads: int, rows: int, dim: int, used: int, room: int, spread: float = 1.0
) -> tuple[Index, torch.Tensor]:
    """What lies beyond `used` is spoilt."""
    generator = torch.Generator().manual_seed(dim + used)
    keys = torch.randn(batch, heads, used, dim, generator=generator) * 3 + 1
    queries = torch.randn(batch, heads, rows, dim, generator=generator) * spread / dim**0.5
    index = Index.of(keys.to(DEVICE), queries.square().sum(2).to(DEVICE), room)
    index.signs[:, :, used:], index.sizes[:, :, used:] = 255, torch.nan
    return index, queries.to(DEVICE)


def check(
    kernel: ModuleType, index: Index, queries: torch.Tensor, entries: int, close: float = 2e-5
) -> None:
    turned = index.turned(queries)
    found = kernel.search(turned, index.signs, index.sizes, index.used, entries)
    assert found.dtype == torch.float32 and found.shape == (*queries.shape[:2], entries)
    expected = expected_attention(
        turned.cpu().numpy(), index.signs.cpu().numpy(), index.sizes.cpu().numpy(), index.used
    )
    np.testing.assert_allclose(
        found[..., : index.used].cpu().numpy(), expected, rtol=close, atol=1e-12
    )
    assert (found[..., index.used :] == 0).all()
    used = torch.tensor([index.used], device=DEVICE)
    assert kernel.search(turned, index.signs, index.sizes, used, entries).equal(found)


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_are_told(kernel: ModuleType, count: int) -> None:
    """As a CPU's index has them: in places that the host knows, or the device; queries beside them,
    or not."""
    with kernels("kvlite.ops.triton_tell") as telling:
        for dim, rows, dtype in ((128, 4, torch.float32), (80, 3, torch.bfloat16)):
            index, _ = index_of(2, 3, 1, dim, used=20, room=12)
            random = torch.Generator().manual_seed(1)
            given = [torch.randn(2, n, 3, dim, generator=random) for n in (count, count, rows)]
            keys, values, queries = (each.transpose(1, 2).to(DEVICE, dtype) for each in given)
            others, turn = index.signs[:, :, :20].clone(), rotation(dim, DEVICE)
            host = [torch.zeros(2, 3, 32, dim, dtype=dtype) for _ in range(2)]
            if DEVICE.type == "cuda":
                host = [each.pin_memory() for each in host]
            both = values, host[0], host[1]
            assert telling.tell(index, turn, keys, 22) is None
            at = torch.tensor([27], device=DEVICE)
            turned = telling.tell(index, turn, keys, at, both, queries, 0.3)
            assert index.signs[:, :, :20].equal(others)
            assert index.sizes[:, :, [21, 22 + count, 26]].isnan().all()
            own = slice(27, 27 + count)
            for to, came in zip(host, (keys, values), strict=True):
                assert to[:, :, own].equal(came.cpu())
                assert not to[:, :, :27].any() and not to[:, :, 27 + count :].any()
            expected = (queries.float() * 0.3 / index.balance[:, :, None]).double() @ turn.double()
            torch.testing.assert_close(turned.double(), expected, atol=1e-5, rtol=1e-5)
            assert telling.tell(index, turn, None, 0, queries=queries, scale=0.3).equal(turned)
            signs, sizes, mean, balance = (each.cpu() for each in index.tensors)
            oracle = Index(signs.clone(), sizes.clone(), mean, balance, 20)
            oracle.add(keys.cpu())
            for place in (22, 27):
                there = slice(place, place + count)
                assert signs[:, :, there].equal(oracle.signs[:, :, 20 : 20 + count])
                held = oracle.sizes[:, :, 20 : 20 + count]
                assert torch.allclose(sizes[:, :, there], held, rtol=1e-5)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("rows", "dim"), [(4, 128), (1, 64), (3, 16), (7, 96), (2, 256), (5, 80), (16, 64), (2, 192)]
)
def test_every_width(kernel: ModuleType, rows: int, dim: int) -> None:
    """Bytes that end within a word, and rows that do not fill their lanes."""
    index, queries = index_of(1, 2, rows, dim, used=150, room=9)
    check(kernel, index, queries, 155)


@pytest.mark.cases(2)
@pytest.mark.parametrize("used", [1, 128, 1023, 1024, 1025, 2600])
@pytest.mark.parametrize("programs", [2, 512])
def test_parts_are_one_softmax(
    kernel: ModuleType, used: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    index, queries = index_of(2, 1, 2, 64, used, room=16)
    check(kernel, index, queries, used + 3)


@pytest.mark.long
def test_more_parts_than_are_merged_at_once(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "TILE", 16)
    monkeypatch.setattr(kernel, "MERGED_AT_ONCE", 4)
    index, queries = index_of(1, 1, 3, 64, 200, room=0)
    check(kernel, index, queries, 200)


@pytest.mark.cases(2)
@pytest.mark.parametrize("spread", [0.0, 1e-6, 40.0])
def test_queries_of_any_size(kernel: ModuleType, spread: float) -> None:
    """Float16 holds none of these as they are; sharp probabilities have their logits' errors."""
    index, queries = index_of(1, 2, 4, 128, 300, room=0, spread=spread)
    check(kernel, index, queries, 300, close=2e-5 if spread < 1 else 1e-3)


def test_as_the_torch_path(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searched, "has_compiled", lambda device: False)
    index, queries = index_of(1, 3, 4, 128, 1500, room=20)
    plain, kernels_own = [], []
    for has_kernel, out in ((False, plain), (True, kernels_own)):
        monkeypatch.setattr(searched, "has_triton", lambda *_, has=has_kernel: has)
        out.append(index.scores(queries, 1510))
    torch.testing.assert_close(plain, kernels_own, rtol=2e-5, atol=1e-9)
    assert not plain[0].equal(kernels_own[0])  # each by its own way
