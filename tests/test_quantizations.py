"""What the cache needs of each form of quantization, and of the one in the docs."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVSize, parse_kv_bits
from kvlite.cache.quantization import FORMS, Form
from kvlite.cache.quantization.vectors import QuantizedVectors
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.snapshot import Snapshot
from tests.conftest import Tiny

DOC = Path(__file__).parents[1] / "docs" / "adding-a-quantization.md"
DIM, HEADS = 64, 3


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that the docs make, registered as they say."""
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text("utf-8"), re.S)
    module = ModuleType("kvlite.cache.quantization.largest")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, str(DOC), "exec"), vars(module))
    monkeypatch.setitem(FORMS, "largest", DOCUMENTED)


DOCUMENTED = Form("largest.Largest", widths=(8,))
CASES = [
    (name, bits) for name, form in {**FORMS, "largest": DOCUMENTED}.items() for bits in form.widths
]


@pytest.fixture(params=CASES, ids=[f"{name}{bits}" for name, bits in CASES])
def form(request: pytest.FixtureRequest, documented: None) -> tuple[Form, int]:
    name, bits = request.param
    return FORMS[name], bits


def vectors(count: int, seed: int = 0) -> Tensor:
    return torch.randn(2, HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))


def whole(held: QuantizedVectors) -> Tensor:
    return held.read(slice(0, held.count))


def test_rounding_products_and_bytes(form: tuple[Form, int]) -> None:
    """Vectors come back; whole steps of the bits, where a form has these, are as close as they
    can be. Products are those of what is read."""
    (kind, group), bits = (form[0].vectors, form[0].group), form[1]
    x = vectors(64)
    held = kind.of(x, bits, group)
    back = whole(held)
    assert (held.count, held.dim, back.shape, back.dtype) == (64, DIM, x.shape, torch.float32)
    near = 0.5 if form[0] is DOCUMENTED else 2.2 / 2**bits
    assert (back - x).norm() < near * x.norm()
    assert sum(each.nbytes for each in held.tensors) == (
        2 * HEADS * 64 * kind.vector_bytes(DIM, bits, group)
    )
    queries, weights = torch.randn(2, HEADS, 5, DIM), torch.rand(2, HEADS, 5, 64)
    torch.testing.assert_close(held.dot(queries), queries @ back.mT, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(held.weigh(weights), weights @ back, atol=1e-3, rtol=1e-4)


def test_storage_is_filled_and_joined(form: tuple[Form, int]) -> None:
    (kind, group), bits = (form[0].vectors, form[0].group), form[1]
    x, y, device = vectors(64, 1), vectors(64, 2), torch.device("cpu")
    held = kind.empty((2, HEADS, 128, DIM), bits, group, device)
    held.clear(slice(0, 128))
    assert whole(held).isfinite().all()
    held.write(slice(0, 64), x)
    assert whole(held.first(64)).equal(whole(kind.of(x, bits, group)))
    held.write(slice(64, 128), y)
    joined = kind.of(x, bits, group).joined(kind.of(y, bits, group))
    assert whole(joined).equal(whole(held))
    assert [tuple(map(torch.equal, a.tensors, b.tensors)) for a, b in [(joined, held)]] == [
        (True,) * len(held.tensors)
    ]


@pytest.mark.parametrize(
    "form",
    [case for case in CASES if case[0] not in FORMS or not FORMS[case[0]].together],
    indirect=True,
    ids="{0[0]}{0[1]}".format,
)
def test_single_vectors_are_picked_and_replaced(
    form: tuple[Form, int],
) -> None:
    (kind, group), bits = (form[0].vectors, form[0].group), form[1]
    held, before = kind.of(vectors(9), bits, group), whole(kind.of(vectors(9), bits, group))
    new = vectors(1, 5)[:, :, 0]
    alone = whole(kind.of(new[:, :, None], bits, group))[:, :, 0]
    places, where = torch.tensor([[0, 3, 8], [1, 1, 2]]), torch.tensor([[1, 0, 1], [1, 1, 0]]) > 0
    held.putting(places, new, where)()
    expected = before.clone()
    for batch, head in where.nonzero().tolist():
        expected[batch, head, places[batch, head]] = alone[batch, head]
    torch.testing.assert_close(whole(held), expected, atol=1e-5, rtol=0)
    at = torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([5, 7])
    held.replacing(at, new[[0, 1], [2, 0]])()
    expected[at] = alone[[0, 1], [2, 0]]
    torch.testing.assert_close(whole(held), expected, atol=1e-5, rtol=0)
    slots = torch.tensor([[[8, 0], [1, 1]], [[2, 4], [5, 3]]])
    taken = whole(held.take(slots, [0, 2]))
    for batch, row, column in torch.cartesian_prod(*map(torch.arange, slots.shape)).tolist():
        slot = slots[batch, row, column]
        torch.testing.assert_close(taken[batch, row, column], expected[batch, 2 * row, slot])
    other = kind.of(vectors(9, 6), bits, group)
    chosen = torch.rand(2, HEADS, 9) < 0.5
    held.copy(slice(0, 9), other, chosen)
    assert whole(held)[chosen].equal(whole(other)[chosen])
    torch.testing.assert_close(whole(held)[~chosen], expected[~chosen], atol=1e-5, rtol=0)


@pytest.fixture
def written(form: tuple[Form, int]) -> Iterator[str]:
    kind, bits = form
    yield next(name for name, each in FORMS.items() if each is kind) + str(bits)


def test_conversations_are_answered_saved_and_go_on(
    written: str, llama: Tiny, tmp_path: Path
) -> None:
    """Two turns; the same after a file as without it, in the planned bytes."""
    bits = parse_kv_bits(written)
    assert bits is not None and str(bits) == written
    settings = Settings(method="full", kv_bits=written, recall="off")
    talk = Conversation(llama.model, settings)
    ids = torch.randint(3, 199, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    talk.generate(ids, max_new_tokens=40, ignore_eos=True)
    packed = [group.packed for layer in talk.cache.layers for group in layer.head_groups]
    assert all(each is not None and each.bits == bits for each in packed)
    entry = bits.entry_bytes(KVSize(1, 16))
    for each in packed:
        assert each is not None and each.storage is not None
        held = sum(tensor.nbytes for tensor in each.storage.tensors) - each.mean.nbytes
        assert held == entry * 2 * each.capacity
    talk.save(tmp_path / "kept")
    again = Conversation(llama.model, settings)
    with Snapshot(tmp_path / "kept") as saved:
        saved.restore(again)
    answers = [
        each.generate([7, 8, 9], max_new_tokens=20, ignore_eos=True).token_ids
        for each in (talk, again)
    ]
    assert answers[0] == answers[1]
