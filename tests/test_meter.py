"""Peak memory: live storages counted one by one, and the process's own high-water mark."""

import mmap
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

import kvlite
from kvlite.config.settings import Settings
from kvlite.memory.meter import PeakMeter, TensorMeter, peak_resident_bytes
from tests.conftest import Tiny

CPU = torch.device("cpu")
KIB = 1024
BATCH = 1 << 20  # the kernel adds up a process's pages in batches


def kib(count: int) -> Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_the_peak_is_that_of_a_sequence_counted_by_hand() -> None:
    with TensorMeter() as meter:
        a = kib(10)
        b = kib(20)  # 30
        del a  # 20
        c = b + 1  # 40, the peak
        del b, c  # 0
        d = kib(5)
        assert (meter.live, meter.peak) == (5 * KIB, 40 * KIB)
        del d
    assert (meter.live, meter.peak) == (0, 40 * KIB)


def test_a_storage_counts_once_and_as_long_as_any_view_lives() -> None:
    with TensorMeter() as meter:
        whole = kib(10)
        views = [whole[5:], whole.view(-1, 2).t(), whole.expand(4, -1), whole.detach()]
        assert meter.live == meter.peak == 10 * KIB
        del whole
        for _ in range(len(views)):
            assert meter.live == 10 * KIB
            views.pop()
        assert meter.live == 0


def test_weights_given_at_the_start_count_once_and_until_they_are_freed() -> None:
    weights = [torch.zeros(KIB), torch.zeros(2, KIB)]
    meter = TensorMeter([*weights, weights[1][0]])
    assert meter.live == meter.peak == 12 * KIB
    with meter:
        tied = weights[1].t()
        result = kib(1)
    assert meter.live == 13 * KIB
    del weights[0], result
    assert meter.live == 8 * KIB
    del weights, tied
    assert (meter.live, meter.peak) == (0, 13 * KIB)


def test_what_has_a_shape_alone_takes_nothing() -> None:
    with TensorMeter([torch.empty(KIB, device="meta")]) as meter:
        a = torch.empty(KIB, device="meta") + 1
        assert a.shape == (KIB,) and meter.live == meter.peak == 0


def test_only_what_is_watched_is_counted() -> None:
    """Between two pieces of an answer, a listener's own tensors are not the answer's."""
    meter = PeakMeter("tensors", CPU, [kib(1)])

    def pieces() -> Iterator[Tensor]:
        for _ in range(3):
            with meter.probe():
                piece = kib(10)
            yield piece

    for piece in pieces():
        outside = kib(1000)
        assert meter.peak_bytes >= piece.numel()
        del outside
    assert meter.peak_bytes < 100 * KIB


def test_a_streamed_answer_is_measured_without_its_listener(llama: Tiny) -> None:
    options = {"method": "full", "measure": "tensors", "max_new_tokens": 4}
    runner = kvlite.Runner(llama.model, Settings().replace(options))
    answer = runner.generate(list(range(3, 100)), ignore_eos=True)
    weights = sum(p.numel() * 4 for p in llama.model.module.parameters())
    least = weights + answer.kv_bytes
    assert least < answer.metrics.peak_bytes < 2 * least
    kept, peaks = [], []
    for piece in runner.conversation().stream_tokens(list(range(3, 100)), ignore_eos=True):
        peaks.append(piece.metrics.peak_bytes)
        kept.append(torch.zeros(least))
    assert peaks == sorted(peaks) and peaks[-1] == answer.metrics.peak_bytes


def test_peaks_measured_in_tensors_show_what_compression_saves(llama: Tiny) -> None:
    def peak(method: str) -> int:
        options = {"measure": "tensors", "chunk": 32, "budget": 40, "max_new_tokens": 1}
        options["recall"] = "off"  # on a CPU what is kept aside is in the same memory
        runner = kvlite.Runner(llama.model, Settings().replace({"method": method, **options}))
        ids = torch.randint(3, 199, (900,), generator=torch.Generator().manual_seed(0)).tolist()
        return runner.generate(ids).metrics.peak_bytes

    saved = llama.model.shape.full_kv_bytes(900 - 40, 4)
    # One layer of the four is there in full at a time, and attended to in parts.
    assert peak("full") - peak("streaming") > 0.5 * saved


def test_a_process_is_measured_by_its_resident_memory() -> None:
    process, meter = psutil.Process(), PeakMeter("process", CPU, [])
    assert peak_resident_bytes() >= process.memory_info().rss - BATCH
    with meter.probe():
        block = mmap.mmap(-1, 64 << 20)  # unlike an array's, its memory is surely given back
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    high = process.memory_info().rss
    block.close()
    assert process.memory_info().rss < high - (32 << 20)
    assert meter.peak_bytes == peak_resident_bytes() >= high - BATCH


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only there does a child inherit a peak")
def test_a_small_process_started_by_a_large_one_is_small() -> None:
    """Linux lets what `getrusage` says of a child begin with its parent's size."""
    large = np.ones(1 << 30, dtype=np.uint8)
    code = "from kvlite.memory.meter import peak_resident_bytes; print(peak_resident_bytes())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(run.stdout) < large.nbytes
