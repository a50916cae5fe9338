"""Every Triton kernel, as it is launched for an 8B model, compiled for cards that nobody here has:
it compiles, and all that a thread computes with stays in registers."""

import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlite.cache import KVHeadGroup, parse_kv_bits
from kvlite.cache.packed import Packed
from kvlite.cache.quantization.hadamard import Hadamard, rotation
from kvlite.offload.kv.index import Index
from kvlite.ops.blocks import FORMATS
from kvlite.ops.layer_ops import Norm
from kvlite.ops.softmax import Softmax
from tests.conftest import CACHE
from tests.cuda import guard

if not guard.POSSIBLE:
    pytest.skip("needs a torch without CUDA, triton and g++", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvlite.ops import triton_experts, triton_layer_ops
from kvlite.ops.triton_candidates import Wanted
from kvlite.ops.triton_decode import attend_quantized
from kvlite.ops.triton_linear import multiply, unpack
from kvlite.ops.triton_ragged import attend_ragged
from kvlite.ops.triton_recall import bring_back
from kvlite.ops.triton_sums import attention_of
from kvlite.ops.triton_tell import tell
from kvlite.ops.triton_topk import search
from kvlite.ops.triton_write import write_token
from tests.cuda.fake_cuda import DEVICE, fake_cuda

KV_HEADS, ENTRIES = 8, 2048
RUN = JITFunction.run
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def attention(
    key_bits: int,
    value_bits: int,
    *,
    rows: int = 4,
    dim: int = 128,
    group: int = 64,
    softcap: float | None = None,
    remembers: bool = False,
) -> None:
    """One token's over a quantized segment, by default of a model with 32 query heads."""
    shape = (1, KV_HEADS, ENTRIES, dim)
    keys = Hadamard.empty(shape, key_bits, group, DEVICE)
    values = Hadamard.empty(shape, value_bits, group, DEVICE)
    queries = torch.zeros(1, KV_HEADS, rows, dim, device=DEVICE)
    logits = queries.new_empty(1, KV_HEADS, rows, ENTRIES) if remembers else None
    shift = queries.new_zeros(1, KV_HEADS, rows)
    hadamard = rotation(dim, DEVICE)
    attend_quantized(queries, keys, values, hadamard, shift, softcap, logits=logits)


def ragged(rows: int = 4, dim: int = 128, softcap: float | None = None) -> None:
    """One token's over exact entries of heads that hold what they hold."""
    queries = torch.zeros(1, KV_HEADS, rows, dim, dtype=torch.bfloat16, device=DEVICE)
    keys = queries.new_zeros(1, KV_HEADS * 64, dim)
    starts = torch.arange(0, KV_HEADS * 64, 64, device=DEVICE)
    runs = starts, starts + 40, 64
    weights = torch.empty(1, KV_HEADS * 64, device=DEVICE)
    for wanted in (None, weights):
        attend_ragged(queries, keys, keys, *runs, Softmax(0.1, softcap), wanted)


def summed(
    rows: int = 4,
    dim: int = 128,
    softcap: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """What a chunk of a prompt looked at, and the most of it."""
    queries = torch.zeros(1, KV_HEADS * rows, 64, dim, dtype=dtype, device=DEVICE)
    keys = queries.new_zeros(1, KV_HEADS, ENTRIES, dim)
    lse = torch.zeros(queries.shape[:3], device=DEVICE)
    for causal, highest in ((True, False), (True, True), (False, True)):
        softmax = Softmax(0.1, softcap)
        attention_of(queries, keys, lse, softmax, causal=causal, highest=highest)


def searched(rows: int = 4, dim: int = 128, *, known: bool = True) -> None:
    """A layer's index, by one token; whether the host knows how much it holds."""
    keys = torch.zeros(1, KV_HEADS, ENTRIES, dim, device=DEVICE)
    queries = keys[:, :, :rows]
    index = Index.of(keys, queries.square().sum(2), 64)
    used = ENTRIES if known else torch.full((1,), ENTRIES, device=DEVICE)
    search(index.turned(queries), index.signs, index.sizes, used, ENTRIES + 16)


def told(rows: int = 4, dim: int = 128) -> None:
    """A token, alone and with its queries."""
    keys = torch.zeros(1, KV_HEADS, ENTRIES, dim, dtype=torch.bfloat16, device=DEVICE)
    host = torch.zeros(1, KV_HEADS, ENTRIES, dim, dtype=torch.bfloat16).pin_memory()
    index = Index.of(keys, keys.square().sum(2).float(), 64)
    own, turn = keys[:, :, :1], rotation(dim, DEVICE)
    tell(index, turn, own, 5)
    tell(index, turn, keys, 0)
    tell(index, turn, own, 5, (own, host, host))
    at = torch.full((1,), 5, device=DEVICE)
    tell(index, turn, own, at, (own, host, host), keys[:, :, :rows], 0.1)
    tell(index, turn, None, 0, queries=keys[:, :, :rows], scale=0.1)


def recalled(
    rows: int = 4, dim: int = 128, *, bits: str = "", remembers: bool = False, known: bool = True
) -> None:
    """Entries that come back from pinned memory."""
    held = torch.zeros(1, KV_HEADS, ENTRIES, dim, dtype=torch.bfloat16, device=DEVICE)
    host = torch.zeros(1, KV_HEADS, 4 * ENTRIES, dim, dtype=torch.bfloat16).pin_memory()
    positions = torch.arange(2 * ENTRIES, dtype=torch.int32, device=DEVICE)
    own, packed = positions.expand(1, KV_HEADS, -1).tensor_split(2, 2)
    memory = torch.zeros(1, KV_HEADS, 4, 2 * ENTRIES, device=DEVICE) if remembers else None
    segment, count = None, 0
    group = KVHeadGroup(tuple(range(KV_HEADS)), held, held, own.clone(), memory)
    if bits:
        form = parse_kv_bits(bits)
        assert form is not None
        sides = (
            Hadamard.empty((1, KV_HEADS, ENTRIES, dim), width, form.group, DEVICE)
            for width in (form.keys, form.values)
        )
        mean = torch.zeros(1, KV_HEADS, dim, device=DEVICE)
        group.segment = Packed(*sides, packed.clone(), mean, form)
        segment, count = (group.segment, rotation(dim, DEVICE)), ENTRIES
    seen = 4 * ENTRIES - 5
    bring_back(
        group,
        segment,
        ENTRIES,
        count if known else torch.full((1,), count, device=DEVICE),
        (host, host),
        held[:, :, :rows],
        0.1,
        torch.zeros(1, KV_HEADS, 4 * ENTRIES, device=DEVICE),
        seen if known else torch.full((1,), seen, device=DEVICE),
        Wanted(148, 592, 4, 16),
        torch.zeros((), dtype=torch.int64, device=DEVICE),
    )


def layer(dim: int = 128, width: int = 4096, *, gemma: bool = False) -> None:
    """What lies between the products of a layer, for one token."""
    hidden = torch.zeros(1, 1, width, dtype=torch.bfloat16, device=DEVICE)
    norm, heads = (Norm(hidden.new_zeros(size), 1e-6, gemma) for size in (width, dim))
    triton_layer_ops.normed(hidden, norm)
    triton_layer_ops.added(hidden, hidden, norm)
    q, k = (hidden.new_zeros(1, count, dim) for count in (4 * KV_HEADS, KV_HEADS))
    table = hidden.new_zeros(1, 1, dim)
    triton_layer_ops.turned(q, k, (heads, heads) if gemma else None, table, table)
    gate, up = hidden.new_zeros(1, 1, 7 * width).chunk(2, -1)
    triton_layer_ops.gated(gate, up, "GELUTanh" if gemma else "SiLUActivation")
    slots = torch.zeros(KV_HEADS, dtype=torch.int64, device=DEVICE)
    held = hidden.new_zeros(1, KV_HEADS, dim)
    into = held, held, torch.zeros(1, KV_HEADS, dtype=torch.int32, device=DEVICE)
    write_token(k, k, into[2][0, :1], into)
    write_token(k, k, slots[:1], into, slots)


def linear(kind: str) -> None:
    """A layer's packed weights, multiplied by a token, and unpacked for many."""
    form = FORMATS[kind]
    packed = torch.zeros(64, 4096 // form.inputs * form.nbytes, dtype=torch.uint8, device=DEVICE)
    multiply(torch.zeros(1, 4096, dtype=torch.bfloat16, device=DEVICE), packed, form)
    unpack(packed, form, torch.empty(64, 4096, dtype=torch.bfloat16, device=DEVICE))


def experts(sizes: tuple[int, int], each: int, *, transposed: bool = False) -> None:
    """A token by those it chose, `(outputs, inputs)`: with gates, and back."""
    chosen = torch.zeros(each, dtype=torch.int64, device=DEVICE)
    for outputs, inputs in (sizes, (sizes[1], sizes[0] // 2)):
        shape = (2, inputs, outputs) if transposed else (2, outputs, inputs)
        weights = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        bias = weights.new_zeros(2, outputs) if transposed else None
        rows = weights.new_zeros(1 if inputs == sizes[1] else each, inputs)
        triton_experts.multiply(rows, chosen, weights.mT if transposed else weights, bias)


def mxfp4() -> None:
    """As `experts`, of gpt-oss as it is published."""
    for outputs, each in ((5760, 4), (2880, 1)):
        blocks = torch.zeros(2, outputs, 90, 16, dtype=torch.uint8, device=DEVICE)
        rows = torch.zeros(4 // each, 2880, dtype=torch.bfloat16, device=DEVICE)
        chosen = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        bias = rows.new_zeros(2, outputs)
        triton_experts.multiply_mxfp4(rows, chosen, blocks, blocks[..., 0].contiguous(), bias)


def nf4() -> None:
    """As `experts`, of Qwen3-30B-A3B with weights in nf4."""
    chosen = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    for outputs, inputs, each in ((1536, 2048, 8), (2048, 768, 1)):
        codes = torch.zeros(2, outputs * inputs // 2, dtype=torch.uint8, device=DEVICE)
        scales = codes[:, : outputs * inputs // 64].contiguous()
        nested, table = torch.zeros(2, scales.shape[1] // 256, device=DEVICE), codes.new_zeros(256)
        packed = codes, scales, nested, nested[:, 0].contiguous()
        rows = torch.zeros(8 // each, inputs, dtype=torch.bfloat16, device=DEVICE)
        triton_experts.multiply_nf4(rows, chosen, packed, (table[:16].float(), table.float()))


def packed_experts(kind: str) -> None:
    """As `experts`, of Qwen3-30B-A3B in the blocks of a GGUF file."""
    form, chosen = FORMATS[kind], torch.zeros(8, dtype=torch.int64, device=DEVICE)
    for outputs, inputs, each in ((1536, 2048, 8), (2048, 768, 1)):
        width = inputs // form.inputs * form.nbytes
        packed = torch.zeros(2, outputs, width, dtype=torch.uint8, device=DEVICE)
        rows = torch.zeros(8 // each, inputs, dtype=torch.bfloat16, device=DEVICE)
        multiply(rows, packed, form, chosen)


WORK: dict[str, Callable[[], None]] = {
    "4 bits": lambda: attention(4, 4),
    "8 bits": lambda: attention(8, 8),
    "k8v4": lambda: attention(8, 4),
    "k4v8": lambda: attention(4, 8),
    "2 bits": lambda: attention(2, 2, group=32),
    "4 bits, remembered": lambda: attention(4, 4, remembers=True),
    "8 bits, remembered": lambda: attention(8, 8, remembers=True),
    "k8v4, remembered": lambda: attention(8, 4, remembers=True),
    "k4v8, remembered": lambda: attention(4, 8, remembers=True),
    "4 bits, 64 query heads": lambda: attention(4, 4, rows=8),
    "4 bits, dim 64": lambda: attention(4, 4, dim=64),
    "4 bits, Gemma 2": lambda: attention(4, 4, rows=2, dim=256, softcap=50.0),
    "ragged": ragged,
    "ragged, Gemma 2": lambda: ragged(rows=2, dim=256, softcap=50.0),
    "sums": summed,
    "sums, dim 96, float16": lambda: summed(dim=96, dtype=torch.float16),
    "sums, Gemma 2": lambda: summed(rows=2, dim=256, softcap=50.0),
    "search": searched,
    "search, dim 64": lambda: searched(dim=64),
    "search, dim 256": lambda: searched(rows=2, dim=256),
    "search in a program": lambda: searched(known=False),
    "a token told": told,
    "a token told, dim 256": lambda: told(2, 256),
    "recall": recalled,
    "recall, dim 256": lambda: recalled(2, 256),
    "recall, 4 bits": lambda: recalled(bits="4"),
    "recall, k8v4, dim 256": lambda: recalled(2, 256, bits="k8v4"),
    "recall, 2 bits": lambda: recalled(bits="2"),
    "recall in a program": lambda: recalled(remembers=True, known=False),
    "recall in a program, 4 bits": lambda: recalled(bits="4", remembers=True, known=False),
    "layer": layer,
    "layer, Gemma 3": lambda: layer(256, 3840, gemma=True),
    **{kind: partial(linear, kind) for kind in FORMATS},
    "experts, Qwen3-30B-A3B": lambda: experts((1536, 2048), 8),
    "experts, gpt-oss-20b": lambda: experts((5760, 2880), 4, transposed=True),
    "experts, MXFP4": mxfp4,
    "experts, nf4": nf4,
    "experts, Q4_K": lambda: packed_experts("Q4_K"),
    "experts, MXFP4 blocks": lambda: packed_experts("MXFP4"),
}


# Bytes of a thread that go through memory nevertheless, at other shapes than an 8B model's.
SPILLS = {(120, "2 bits"): 8, (120, "4 bits, Gemma 2"): 32, (120, "a token told"): 8}


class Card(SimpleNamespace):
    """What Triton asks a driver for."""

    def get_current_device(self) -> int:
        return int(self.capability)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(CACHE / "triton"))
    monkeypatch.setattr(triton.runtime.driver, "_active", Card(capability=request.param))
    return int(request.param)


@pytest.mark.cases(1, 26)
@pytest.mark.parametrize(
    ("card", "name"),
    [
        (card, name)
        for card in (86, 89, 90, 120)
        for name in WORK
        if card != 90 or name.startswith(("experts", "sums"))
    ],
    indirect=["card"],
)
def test_nothing_spills(card: int, name: str, tmp_path: Path) -> None:
    compiled: dict[str, Any] = {}

    def keep(kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
        name = f"{kernel.fn.__name__} {len(compiled)}"
        compiled[name] = RUN(kernel, *args, grid=grid, warmup=True, **kwargs)

    with fake_cuda() as device:
        device.kernels = keep
        WORK[name]()
    assert compiled
    for kernel, made in compiled.items():
        used = resources(made.asm["cubin"], tmp_path)
        assert used["LOCAL"] == 0
        assert used["STACK"] <= SPILLS.get((card, name), 0), f"{kernel} spills: {used}"


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """What a kernel takes, as NVIDIA's tool names it: registers of a thread, bytes of memory."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [TOOLS / "cuobjdump", "--dump-resource-usage", file]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", said)}
