"""Choosing on the host keeps what the device would keep, and moves what arithmetic says."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlite
from kvlite.cache import LayerCache
from kvlite.config.settings import Settings
from kvlite.engine.prefill import Prefill
from kvlite.engine.slices import in_one_go
from kvlite.errors import SettingError
from kvlite.memory.meter import TensorMeter
from kvlite.methods import METHODS, LayerView, Method, parse_method
from kvlite.methods.layer_policy import layer_policies, share_out
from kvlite.methods.placement import ON_DEVICE, ScoringBackend
from kvlite.methods.scores import Window
from kvlite.offload import HostScores
from kvlite.offload import host_scoring as offload
from kvlite.offload.host_scoring import HostSoftmax, HostTransfer
from kvlite.ops.softmax import Softmax
from tests.conftest import Tiny, make_tiny
from tests.test_api import held
from tests.test_engine import empty
from tests.test_registry import prompt

CUDA = ["cuda"] if torch.cuda.is_available() else []
HOSTS = ["host", "host-softmax"]
N = 200

# Beside each method as it is: other ways through what all of them share.
OTHERS = [
    "simlayerkv:threshold=0.3,last=9,recent=20+kvx",
    "simlayerkv:threshold=1+snapkv:window=8",
    "simlayerkv:threshold=1+keydiff",
    "minference:columns=40,near=20,observed=8+snapkv:window=8",
    "snapkv:window=8,per_head=true,queries=max",
    "snapkv:window=8,layers=global,pooling=avg",
    "snapkv:window=8,groups=2",
    "kvx:layers=entropy,queries=mean",
    "kvx:layers=gini,heads=sum",
    "kvx:per_layer=true",
    "kvx:middle=example,until_limit=true",
    "tova:per_head=true",
    "keydiff:layers=global",
    "h2o:norm=mean,per_head=true",
    "uncomp:delete=1",
    "uncomp:stage=true,least=60",
    "pyramidinfer:recent=0.1,least=8",
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows, parts of entries and pieces of a copy, even of a short text."""
    monkeypatch.setattr("kvlite.methods.scores.ELEMENTS_AT_ONCE", 2 * N * 3)
    monkeypatch.setattr("kvlite.methods.scores.KEY_ELEMENTS_AT_ONCE", 16 * 70)
    monkeypatch.setattr(offload, "ELEMENTS_AT_ONCE", 90)


def told(tiny: Tiny, method: str, budget: int, scores: str, **settings: Any) -> list[Any]:
    """What is held after two turns, and what was answered."""
    chosen = {"method": method, "budget": budget, "scores": scores, "max_new_tokens": 4}
    talk = kvlite.Runner(tiny.model, Settings().replace({**chosen, **settings})).conversation()
    first = talk.generate(prompt(N), ignore_eos=True).token_ids
    between = held(talk)
    second = talk.generate(prompt(30), ignore_eos=True).token_ids
    return [first, between, second, held(talk)]


def require_same(tiny: Tiny, spec: str, budget: int, **settings: Any) -> None:
    device = told(tiny, spec, budget, "device", **settings)
    for scores in HOSTS:
        assert told(tiny, spec, budget, scores, **settings) == device, scores


@pytest.mark.cases(2, 24)
@pytest.mark.parametrize("device", ["cpu", *CUDA])
@pytest.mark.parametrize("more", [0, 7, 60])
@pytest.mark.parametrize("spec", [*METHODS, *OTHERS])
def test_the_host_keeps_what_the_device_keeps(spec: str, more: int, device: str) -> None:
    tiny = make_tiny("llama", device)
    require_same(tiny, spec, parse_method(spec).min_budget + more)


@pytest.mark.cases(1, 12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [*METHODS, *OTHERS])
def test_in_16_bits_too(spec: str, dtype: torch.dtype) -> None:
    tiny = make_tiny("llama", dtype=dtype)
    require_same(tiny, spec, parse_method(spec).min_budget + 20)


@pytest.mark.cases(1, 6)
@pytest.mark.parametrize("name", ["llama-mha", "gemma2", "qwen3"])
@pytest.mark.parametrize("spec", ["snapkv:window=8", "kvx", "tova", "simlayerkv+kvx"])
def test_other_heads_caps_and_windows(name: str, spec: str) -> None:
    spec = spec.replace("simlayerkv", "simlayerkv:threshold=0.5,recent=20")
    require_same(make_tiny(name), spec, 40)


# --- what is moved -------------------------------------------------------------------------------

LAYERS, HEADS, KV_HEADS, FLOAT, INT = 4, 4, 2, 4, 4
SCORES = FLOAT * KV_HEADS * N
POSITIONS = INT * KV_HEADS * N
ONE_ROW = FLOAT * HEADS * N
TESTED = ONE_ROW + POSITIONS
# Eight rows in blocks of 3, 3 and 2; a block sees as far as its last row does.
EIGHT_ROWS = FLOAT * HEADS * (3 * (N - 5) + 3 * (N - 2) + 2 * N)


def indices(budget: int) -> int:
    return INT * KV_HEADS * budget


# Method, budget; bytes a layer to the host with `host` and with `host-softmax`, and back.
MOVED: list[tuple[str, int, int, int, int]] = [
    ("snapkv:window=8", 40, SCORES, EIGHT_ROWS, indices(40)),
    ("kvx:layers=uniform,alpha=8", 40, SCORES, EIGHT_ROWS, indices(40)),
    ("kvx:layers=uniform,alpha=8,per_layer=true", 40, SCORES, EIGHT_ROWS + POSITIONS, indices(40)),
    ("tova", 40, SCORES, TESTED, indices(40)),
    ("h2o", 40, SCORES, SCORES, indices(40)),
    ("simlayerkv:threshold=1,last=8,recent=9", 40, 0, EIGHT_ROWS + POSITIONS, 0),
    ("simlayerkv:threshold=1,last=1,recent=9+h2o", 40, SCORES, TESTED + SCORES, indices(40)),
    ("keydiff", 40, 0, 0, 0),
    ("random:window=8", 40, 0, 0, 0),
    ("streaming", 40, 0, 0, 0),
    ("lminfinite", 40, 0, 0, 0),
    ("full", 40, 0, 0, 0),
    # While layers wait for each other they keep four budgets, as far as there are entries.
    ("snapkv:window=8,layers=global", 30, SCORES, EIGHT_ROWS, indices(120)),
]  # fmt: skip


def read_by(tiny: Tiny, spec: str, budget: int, backend: HostScores) -> list[tuple[int, int]]:
    """Bytes to the host and back, layer by layer, and for what layers share in the end."""
    method: Method = parse_method(spec)
    cache, ids = empty(tiny.model), torch.tensor([prompt(N)])
    policies = layer_policies(method, tiny.model.shape, budget, N)
    moved, layers = [(0, 0)], []
    with torch.inference_mode():
        reading = Prefill(tiny.model, cache, ids, policies, backend=backend)
        for index in range(LAYERS):
            layers.append(in_one_go(reading.compressed(index)))
            moved.append((backend.host_transfer.to_host, backend.host_transfer.back))
        share_out(layers, policies, 0, backend)
        moved.append((backend.host_transfer.to_host, backend.host_transfer.back))
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(moved)]


@pytest.mark.parametrize(("spec", "budget", "host", "softmax", "back"), MOVED)
def test_bytes_of_a_layer_are_the_arithmetic(
    llama: Tiny, spec: str, budget: int, host: int, softmax: int, back: int
) -> None:
    last = indices(budget) * LAYERS if "global" in spec else 0
    for kind, up in ((HostScores, host), (HostSoftmax, softmax)):
        backend = kind(llama.model.device)
        assert read_by(llama, spec, budget, backend) == [(up, back)] * LAYERS + [(0, last)]
        assert (backend.seconds > 0) == (up > 0 or back > 0 or "simlayer" in spec)


def test_bytes_where_tokens_are_left_behind(llama: Tiny) -> None:
    """One vote a token goes there, and what goes on comes back, before each thinner layer."""
    spec = "pyramidinfer:recent=0.1,least=8"
    pruning = parse_method(spec).prefilling.pruning
    assert pruning is not None
    widths = pruning.token_budgets(LAYERS, N, N)
    assert widths[-1] < widths[-2] < N
    moved = read_by(llama, spec, 40, HostScores(llama.model.device))
    expected = [
        (FLOAT * through, INT * goes_on) if goes_on < through else (0, 0)
        for through, goes_on in pairwise([*widths, widths[-1]])
    ]
    assert moved == [*expected, (0, 0)]


def test_the_answer_says_what_was_moved(llama: Tiny) -> None:
    settings = {"method": "snapkv:window=8", "budget": 40, "max_new_tokens": 2}
    runner = kvlite.Runner(llama.model, Settings().replace(settings))
    usual = runner.generate(prompt(N)).metrics
    names = ("score_bytes_to_host", "score_bytes_back", "score_s")
    assert [usual.to_json()[name] for name in names] == [None] * 3
    assert "host" not in usual.line()
    metrics = runner.generate(prompt(N), scores="host").metrics
    said = json.loads(json.dumps(metrics.to_json()))
    assert said["score_bytes_to_host"] == LAYERS * SCORES
    assert said["score_bytes_back"] == LAYERS * indices(40)
    assert 0 < said["score_s"] < metrics.time_to_first_token_s
    assert f"chosen on the host, 7.5 KiB moved, {metrics.score_s:.1f} s" in metrics.line()
    shared = runner.generate(prompt(N), scores="host", method="snapkv:window=8,layers=global")
    assert shared.metrics.score_bytes_back == LAYERS * (indices(4 * 40) + indices(40))
    within = runner.generate(prompt(30), scores="host").metrics
    assert [within.to_json()[name] for name in names] == [0, 0, 0.0]
    with pytest.raises(SettingError, match="--scores 'cpu' is not one of device, host"):
        Settings(scores="cpu")


# --- the wire ------------------------------------------------------------------------------------


class LateHostTransfer(HostTransfer):
    """Copies only when somebody waits for them, as late as a device may."""

    most = 0

    def _copy(self, source: Tensor, staged: Tensor) -> Any:
        self.most = max(self.most, len(self._flights) + 1)
        if staged.is_floating_point():
            staged.fill_(torch.nan)
        return SimpleNamespace(synchronize=lambda: staged.copy_(source))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
@pytest.mark.parametrize("count", [1, 89, 90, 91, 500])
def test_what_is_fetched_is_a_copy_whatever_its_strides(count: int, dtype: torch.dtype) -> None:
    source = (torch.rand(2, 3, count + 7) * 9).to(dtype)[:, 1:, :count]
    host_transfer = LateHostTransfer(torch.device("cpu"))
    there = host_transfer.fetch(source)
    assert there.dtype == dtype and there.equal(source)
    assert there.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    size = source.element_size()
    assert host_transfer.to_host == 4 * count * size and host_transfer.back == 0
    # Two buffers of the largest piece, whatever the length of what is copied.
    assert sum(each.numel() for each in host_transfer.buffers) <= 2 * min(count, 90) * size
    assert host_transfer.most == min(2, 4 * -(-count // 90))


@pytest.mark.parametrize("kind", [HostScores, HostSoftmax])
@pytest.mark.parametrize("spec", ["snapkv:window=8", "kvx", "tova", "h2o"])
def test_nothing_is_looked_at_before_it_has_arrived(
    llama: Tiny, spec: str, kind: type[HostScores]
) -> None:
    kept = []
    for host_transfer in (HostTransfer, LateHostTransfer):
        backend = kind(llama.model.device)
        backend.host_transfer = host_transfer(llama.model.device)
        policies = layer_policies(parse_method(spec), llama.model.shape, 40, N)
        with torch.inference_mode():
            ids = torch.tensor([prompt(N)])
            reading = Prefill(llama.model, empty(llama.model), ids, policies, backend=backend)
            layers = [in_one_go(reading.compressed(index)) for index in range(LAYERS)]
        kept.append([layer.positions.tolist() for layer in layers])
    assert kept[0] == kept[1]


# --- workspace -----------------------------------------------------------------------------------

MIB = 1 << 20
ENTRIES, DIM_8B, HEADS_8B, KV_8B = 131_072, 128, 32, 8
BLOCK = 16 * MIB  # 8 rows of 4 heads, float32
ONE_FLOAT = 4 * ENTRIES


class DeviceMeter(TensorMeter):
    """Live bytes of one kind of device, and the largest 64-bit tensor there."""

    def __init__(self, kind: str, held: list[Tensor]) -> None:
        self.kind = kind
        self.widest = 0
        super().__init__(held)
        self.before = self.live

    def _takes_memory(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.kind

    def _count(self, tensor: Tensor) -> None:
        super()._count(tensor)
        if tensor.dtype == torch.int64 and self._takes_memory(tensor):
            self.widest = max(self.widest, tensor.numel())


class MetaHostTransfer(HostTransfer):
    """From a device without memory."""

    def _copy(self, source: Tensor, staged: Tensor) -> None:
        staged.zero_()


@pytest.mark.parametrize("rows", [32, 64])
def test_the_devices_workspace_at_131072_tokens(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """An 8B model's layer on torch's `meta` device, which knows sizes alone."""
    monkeypatch.undo()
    torch.set_num_threads(2)
    method, device = parse_method(f"snapkv:window={rows}"), torch.device("meta")
    heads = tuple(range(KV_8B))
    layer = LayerCache([(heads, ENTRIES)], batch=1, dim=DIM_8B, dtype=torch.bfloat16, device=device)
    layer.head_groups[0].used = ENTRIES
    queries = torch.empty(1, HEADS_8B, rows, DIM_8B, dtype=torch.bfloat16, device=device)
    window = Window(queries, ENTRIES - rows, KV_8B, Softmax(DIM_8B**-0.5, in_tiles=True))
    peaks, widest = {}, {}
    backends: dict[str, ScoringBackend] = {"device": ON_DEVICE, "host": HostScores(device)}
    if rows == 32:
        backends["host-softmax"] = HostSoftmax(device)
    for name, backend in backends.items():
        if isinstance(backend, HostScores):
            backend.host_transfer = MetaHostTransfer(device)
        view = LayerView(0, layer.head_groups, replace(window, backend=backend), 1024)
        with torch.inference_mode(), DeviceMeter("meta", [*layer.tensors, queries]) as meter:
            (chosen,) = method.select(view)
            backend.slots(chosen.slots)
        peaks[name], widest[name] = meter.peak - meter.before, meter.widest
    in_tiles, some_keys = (HEADS_8B + KV_8B) * ONE_FLOAT, 8 * MIB
    expected = {
        "device": in_tiles,  # no row of attention is ever whole
        "host": in_tiles,
        "host-softmax": some_keys + 3 * BLOCK // 8,
    }
    assert {name: round(size / MIB) for name, size in expected.items()} == {
        "device": 20,
        "host": 20,
        "host-softmax": 14,
    }
    for name, peak in peaks.items():
        assert peak == pytest.approx(expected[name], abs=MIB / 8), name
    # 64-bit: what is sorted, on the device; on the host's, the numbers of a block's rows alone.
    assert widest["device"] >= KV_8B * (ENTRIES - rows)
    assert all(widest[name] <= rows for name in widest if name != "device")
    for name, backend in backends.items():
        if isinstance(backend, HostScores):
            largest = 3 * BLOCK // 24 if name == "host-softmax" else 4 * ENTRIES
            assert [each.numel() for each in backend.host_transfer.buffers] == [largest] * 2
