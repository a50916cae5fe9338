"""What goes to the host store and back without waiting: the calls of CUDA, on a CPU."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvlite.cache import KVBits, KVHeadGroup, LayerCache, Selection
from kvlite.engine.callbacks import Callbacks
from kvlite.offload import HostKVStore, Recall
from kvlite.offload.kv.index import Index
from kvlite.offload.kv.store import HostKVLayer
from kvlite.offload.kv.swap import RECENT, SINKS, RecallQuery, swap_in, swap_in_place
from kvlite.offload.kv.transfer import KVTransfer
from tests.conftest import Tiny
from tests.interpreted import DEVICE, kernels

from .oracles import recall as oracle
from .test_packed import random_ids
from .test_pinned import pinning_runtime
from .test_recall import LIMITS, chat, full_head_group, last_logits, logits_of_the_whole

HOST = torch.device("cpu")
WAYS = ["staged", *(["mapped"] if find_spec("triton") and DEVICE == HOST else [])]


class Mapped(KVTransfer):
    """A device that reads the host's memory by itself, as a CPU does."""

    def reads(self, head_group: KVHeadGroup) -> bool:
        return True


class Late(KVTransfer):
    """Copies arrive when they are waited for, and never before."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.under_way: list[Callable[[], None]] = []

    def append(
        self, head_group: KVHeadGroup, keys: Tensor, values: Tensor, positions: Tensor
    ) -> None:
        own = slice(head_group.used, head_group.used + keys.shape[2])
        head_group.residual_keys[:, :, own], head_group.residual_values[:, :, own] = (
            torch.nan,
            torch.nan,
        )
        head_group.residual_positions[:, :, own] = -1
        given = keys.clone(), values.clone(), positions.clone()

        def arrive() -> None:
            head_group.residual_keys[:, :, own], head_group.residual_values[:, :, own] = given[:2]
            head_group.residual_positions[:, :, own] = given[2]

        self.under_way.append(arrive)
        head_group.used = own.stop

    def wait(self) -> None:
        super().wait()
        while self.under_way:
            self.under_way.pop()()


@pytest.fixture(params=WAYS)
def transfer(request: pytest.FixtureRequest) -> Iterator[KVTransfer]:
    if request.param == "staged":
        yield KVTransfer(HOST)
        return
    with kernels("kvlite.ops.triton_recall"):
        yield Mapped(HOST)


@pytest.fixture
def no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlite.offload.kv.recall.has_compiled", lambda device: False)


def some_held(
    everything: LayerCache,
    heads: tuple[int, ...],
    rows: int = 0,
    batch: int = 1,
    bits: KVBits | None = None,
) -> KVHeadGroup:
    """A head group of 60 of 300 entries of some heads."""
    random = torch.Generator().manual_seed(5)
    at = torch.stack(
        [
            torch.randperm(300, generator=random)[:60].sort().values
            for _ in range(len(heads) * batch)
        ]
    )
    chosen = Selection(everything.head_groups[0], at.view(batch, len(heads), 60), heads)
    (head_group,) = LayerCache.gathered([chosen], [60], decode_rows=rows, bits=bits).head_groups
    if head_group.rows is not None:
        head_group.rows.copy_(torch.rand(head_group.rows.shape, generator=random) + 1)
    return head_group


def asked(heads: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(6)
    queries = torch.randn(batch, heads, 4, 64, generator=random)
    return queries, torch.rand(batch, 3, 300, generator=random)


def lines(head_group: KVHeadGroup) -> list[set[int]]:
    return [set(line.tolist()) for line in head_group.positions.flatten(0, 1)]


@pytest.mark.cases(4)
@pytest.mark.parametrize("heads", [(0, 1, 2), (2,), (0, 2)])
def test_a_token_brings_back_what_the_oracle_says(
    transfer: KVTransfer, heads: tuple[int, ...], no_loops: None
) -> None:
    everything = full_head_group(300)
    source, head_group = everything.head_groups[0], some_held(everything, heads)
    before, (queries, rough) = lines(head_group), asked(len(heads))
    layers, transfers = [HostKVLayer(everything, None, 300)], {HOST: transfer}
    store = HostKVStore(layers, None, seen=300, transfers=transfers)
    recall = Recall(store, 40 - SINKS - RECENT)
    recall.bring_back(0, head_group, queries, rough)
    numbers = (each[0].double().numpy() for each in (queries, source.keys, rough))
    expected, came = oracle.lines_after(before, heads, *numbers, **LIMITS), 0
    for row, head in enumerate(heads):
        now = lines(head_group)[row]
        assert now == expected[row] and len(now) == 60
        came += len(now - before[row])
        places = head_group.positions[0, row].long()
        assert head_group.residual_keys[0, row].equal(source.keys[0, head, places])
        assert head_group.residual_values[0, row].equal(source.values[0, head, places])
    assert recall.num_fetched == came > 0 and recall.num_requested == 40 * len(heads)
    recall.bring_back(0, head_group, queries, rough)
    assert recall.num_fetched == came  # all is there


@pytest.mark.cases(1, 6)
@pytest.mark.parametrize("bits", [None, KVBits(4, 4), KVBits(8, 4)])
@pytest.mark.parametrize("count", [SINKS + RECENT + 1, 40, 60])
def test_as_where_the_device_is_waited_for(
    transfer: KVTransfer, count: int, bits: KVBits | None
) -> None:
    """Two sequences, what is remembered of attention, and numbers that are none."""
    if bits is not None and not isinstance(transfer, Mapped):
        pytest.skip("what is quantized is brought back otherwise")
    everything = full_head_group(300)
    one = everything.head_groups[0]
    pair = LayerCache([((0, 1, 2), 300)], batch=2, dim=64, dtype=torch.float32, device=HOST)
    keys = torch.cat([one.residual_keys, one.residual_keys.flip(1)])
    pair.head_groups[0].append(keys, -keys, torch.arange(300, dtype=torch.int32))
    source, (queries, rough) = pair.head_groups[0], asked(2, batch=2)
    rough[:, :, 90:150:7] = torch.nan
    head_groups = [some_held(pair, (0, 2), rows=2, batch=2, bits=bits) for _ in range(2)]
    old = lines(head_groups[0])
    query, mine = RecallQuery(queries, 1.0, rough, source, count), torch.tensor(0)
    came = swap_in(head_groups[0], query)
    swap_in_place(head_groups[1], query, transfer, mine)
    assert int(mine) == came > 0 and lines(head_groups[0]) == lines(head_groups[1]) != old
    orders = [head_group.positions.argsort(-1) for head_group in head_groups]
    for name in ("keys", "values"):
        sides = [
            getattr(head_group, name).gather(2, order[..., None].expand(-1, -1, -1, 64))
            for head_group, order in zip(head_groups, orders, strict=True)
        ]
        # Which entries go where it is quantized is open.
        assert torch.allclose(sides[0], sides[1], rtol=0, atol=0.7 if bits else 0)
    rows = [
        head_group.rows.gather(3, order[:, :, None].expand(-1, -1, 2, -1))
        for head_group, order in zip(head_groups, orders, strict=True)
        if head_group.rows is not None
    ]
    assert rows[0].equal(rows[1]) and int((rows[0] == 0).sum()) == 2 * came


class NothingIsReadBack(TorchDispatchMode):
    """Refuses what needs to know numbers, not shapes alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "masked_select"), name
        indices = args[1] if name in ("index", "index_put_") else []
        assert all(each is None or each.dtype != torch.bool for each in indices)
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back(transfer: KVTransfer) -> None:
    everything = full_head_group(300)
    head_group, (queries, rough) = some_held(everything, (0, 1, 2), rows=1), asked(3)
    query = RecallQuery(queries, 1.0, rough, everything.head_groups[0], 40)
    with NothingIsReadBack():
        swap_in_place(head_group, query, transfer, torch.tensor(0))
    with pytest.raises(AssertionError), NothingIsReadBack():
        swap_in(some_held(everything, (0, 1, 2)), query)


class Scarce(TorchDispatchMode):
    """The k-th operator that takes memory finds none."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        taken = not func._schema.is_mutable and not func.is_view
        self.left -= taken
        if taken and self.left == 0:
            raise torch.OutOfMemoryError("none left")
        return func(*args, **(kwargs or {}))


@pytest.mark.long
def test_what_broke_off_may_be_tried_again() -> None:
    transfer = KVTransfer(HOST)
    everything = full_head_group(300)
    queries, rough = asked(1)
    query = RecallQuery(queries, 1.0, rough, everything.head_groups[0], 40)

    def swapped(head_group: KVHeadGroup) -> int:
        came = torch.tensor(0)
        swap_in_place(head_group, query, transfer, came)
        return int(came)

    whole = some_held(everything, (2,), rows=1)
    came = swapped(whole)
    for k in range(1, 200):
        head_group = some_held(everything, (2,), rows=1)
        before = (
            head_group.residual_positions.clone(),
            head_group.residual_keys.clone(),
            head_group.residual_values.clone(),
        )
        scarce, failed = Scarce(k), False
        try:
            came_now = torch.tensor(0)
            with scarce:
                swap_in_place(head_group, query, transfer, came_now)
        except torch.OutOfMemoryError:
            failed = True
        if not failed:
            break
        assert head_group.residual_positions.equal(before[0])
        assert head_group.residual_keys.equal(before[1]) and head_group.residual_values.equal(
            before[2]
        )
        assert swapped(head_group) == came
        assert lines(head_group) == lines(whole)
    assert 7 < k < 199


def test_tokens_of_an_answer_arrive_in_their_places(transfer: KVTransfer) -> None:
    layer = LayerCache([((0, 1, 2), 90)], batch=1, dim=64, dtype=torch.float32, device=HOST)
    head_group, source = layer.head_groups[0], full_head_group(80).head_groups[0]
    layer.keys.fill_(torch.nan)
    index = Index.of(source.residual_keys, torch.ones(1, 3, 64), 20)
    index.used, whole = 60, slice(0, 60)
    signs = index.signs[:, :, :80].clone()
    index.signs[:, :, 60:] = 0
    transfer.append(
        head_group,
        source.residual_keys[:, :, whole],
        source.residual_values[:, :, whole],
        source.residual_positions[0, 0, whole],
    )
    for at in range(60, 80):
        own = slice(at, at + 1)
        given = source.residual_keys[:, :, own], source.residual_values[:, :, own]
        transfer.put(head_group, *given, at, index)
        assert head_group.used == at + 1 and int(head_group.residual_positions[0, 2, at]) == at
        if at == 70:
            every = torch.arange(71).expand(1, 3, -1)
            keys, values = transfer.fetch(head_group, (0, 1, 2), every)
            assert keys.equal(source.residual_keys[:, :, :71])
            assert values.equal(source.residual_values[:, :, :71])
    transfer.wait()
    assert index.used == 60 and index.signs[:, :, :80].equal(signs)
    assert head_group.residual_keys[:, :, :80].equal(source.residual_keys)
    assert head_group.residual_values[:, :, :80].equal(source.residual_values)


@pytest.mark.cases(1, 6)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "h2o"},
        {"method": "snapkv:per_head=true"},
        {"method": "pyramidinfer"},
        {"kv_bits": "4"},
        {"recall_bits": "4"},
        {"recall": "disk"},
    ],
)
@pytest.mark.parametrize("kind", [KVTransfer, Late])
def test_conversations_are_the_same(
    llama: Tiny,
    settings: dict[str, str],
    kind: type[KVTransfer],
    no_loops: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns, a turn that is stopped, a host store that grows, and answers long enough for the
    index."""
    runtime, told = pinning_runtime(monkeypatch), []
    for ferries in (False, True):
        if ferries:
            monkeypatch.setattr("kvlite.offload.kv.store.transfer_to", lambda device: pinning(kind))
        given = {"method": "kvx", "budget": 90, "recall_entries": 40, **settings}
        talk = chat(llama.model, max_new_tokens=40, **given)
        found: list[Any] = []
        for turn in range(3):
            ids = random_ids(220 if turn == 0 else 40, turn)[0].tolist()
            answer = talk.generate(ids, ignore_eos=True)
            found += [answer.token_ids, answer.metrics.recalled_bytes]
            _stopped(talk)
        logits = last_logits(talk, [5, 6, 7])
        told.append(found)
        assert talk.store is not None and (any(talk.store.transfers.values())) == ferries
    if "recall_bits" not in settings and settings.get("method") != "pyramidinfer":
        upto = talk.token_ids[: len(talk.token_ids) - 39]
        torch.testing.assert_close(logits, logits_of_the_whole(llama, upto), atol=1e-4, rtol=1e-4)
    assert told[0] == told[1]
    assert bool(runtime.held) == ("recall_bits" not in settings and "recall" not in settings)


def pinning(kind: type[KVTransfer]) -> KVTransfer:
    made = kind(HOST)
    made.pins = True
    return made


def _stopped(talk: Any) -> None:
    """A turn that is begun and left after a token, and one that is stopped while it reads."""
    pieces = talk.stream_tokens([9, 8], ignore_eos=True)
    next(pieces)
    pieces.close()

    def stop(done: int, of: int) -> None:
        if done > of / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.read([3] * 200, callbacks=Callbacks(progress=stop))
