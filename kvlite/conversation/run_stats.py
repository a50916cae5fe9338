"""Time, memory, streamed weights and recalled entries of one turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from kvlite.cache import KVCache
from kvlite.engine.slices import SLICE_S, Slices, T
from kvlite.memory.meter import PeakMeter
from kvlite.model.load import LoadedModel
from kvlite.model.shape import ModelShape
from kvlite.offload import HostKVStore, Recall
from kvlite.offload.host_scoring import HostScores


class RunStats:
    """What one turn takes.

    Attributes:
        planned_phases: the planned peak of each phase, in bytes of live tensors; empty if unknown.
        generated: tokens sampled.
        streamed: bytes of weights that came to the device.
        read_s, first_s, last_s: seconds from `started` until everything was read, the first token
            and the latest token; 0 before that.
        others_s: seconds that others had between slices; not in `read_s`.
    """

    def __init__(self, started: float, meter: PeakMeter) -> None:
        self.started = started
        self.meter = meter
        self.planned_phases: dict[str, int] = {}
        self.generated = 0
        self.streamed = 0
        self.read_s = 0.0
        self.others_s = 0.0
        self.first_s = 0.0
        self.last_s = 0.0

    @property
    def planned(self) -> int | None:
        """The highest planned peak; None if unknown."""
        return max(self.planned_phases.values(), default=None)

    @contextmanager
    def work(self, model: LoadedModel) -> Iterator[None]:
        """Count what a model does meanwhile; it may begin to stream its weights."""
        before = model.layers.brought
        with self.meter.probe():
            yield
        self.streamed += model.layers.brought - before

    def in_slices(self, model: LoadedModel, steps: Slices[T]) -> Slices[T]:
        """Steps of a model's work, counted as by `work`. They wait whenever a slice's time is over,
        but not with streamed weights: a step of others brings every layer to the device, and then
        this work's layer comes once more."""
        try:
            while True:
                end = perf_counter() + SLICE_S
                with self.work(model):
                    try:
                        next(steps)
                        while perf_counter() < end or model.layers.passing is not None:
                            next(steps)
                    except StopIteration as last:
                        result: T = last.value
                        return result
                left = perf_counter()
                unwanted = (yield) or 0.0
                self.started += unwanted
                self.others_s += perf_counter() - left - unwanted
        finally:
            with self.work(model):
                steps.close()

    def was_read(self) -> None:
        """Reading ended."""
        self.meter.end_phase("read")
        self.read_s = perf_counter() - self.started - self.others_s

    def was_drawn(self) -> None:
        """A token was sampled."""
        self.generated += 1
        self.last_s = perf_counter() - self.started
        self.first_s = self.first_s or self.last_s

    def begin_again(self) -> None:
        """Forget the answer: another one begins when the first one did."""
        self.generated, self.first_s = 0, 0.0
        self.started = perf_counter() - self.read_s

    def figures(self, read: int, *, ended: bool) -> dict[str, Any]:
        """Fields of `GenerationMetrics`. `read` counts the tokens of an earlier answer, too."""
        decoding, peak, planned = self.last_s - self.first_s, self.meter.peak_bytes, self.planned
        if ended:
            self.meter.end_phase("answer")
        return {
            "generated_tokens": self.generated,
            "streamed_bytes": self.streamed,
            "peak_bytes": peak,
            "peak_of": "tensors" if self.meter.of_tensors else "process",
            "planned_peak_bytes": planned,
            "phase_peak_bytes": self.meter.phases,
            "planned_phase_bytes": self.planned_phases,
            "plan_error": planned / peak - 1 if planned and self.meter.of_tensors else None,
            "time_to_first_token_s": self.first_s,
            "prefill_tokens_per_s": read / self.read_s,
            "decode_tokens_per_s": (self.generated - 1) / decoding if decoding > 0 else 0.0,
        }


def kept(shape: ModelShape, cache: KVCache) -> dict[str, Any]:
    """The fields of `GenerationMetrics` about what the cache holds, and in how many layers."""
    return {
        "kept_entries_mean": cache.entries_mean,
        "kv_bytes": cache.nbytes,
        "state_bytes": cache.state_bytes,
        "layers": shape.layers,
        "recurrent_layers": shape.recurrent_layers,
    }


def chosen(backend: HostScores | None) -> dict[str, Any]:
    """The fields of `GenerationMetrics` about what the host scored, if it did."""
    if backend is None:
        return {}
    sent = backend.host_transfer
    moved = {"score_bytes_to_host": sent.to_host, "score_bytes_back": sent.back}
    return {**moved, "score_s": backend.seconds}


def recalled(store: HostKVStore | None, recall: Recall | None, entry_bytes: int) -> dict[str, Any]:
    """The recall fields of `GenerationMetrics`; `entry_bytes` is one entry of one KV head."""
    if store is None or recall is None:
        return {}
    return {
        "index_bytes": store.index_bytes,
        "host_kv_bytes": store.nbytes,
        "host_kv_place": "disk" if store.on_disk else "ram",
        "recalled_bytes": recall.brought * entry_bytes,
        "recall_hit_rate": 1 - recall.brought / recall.wanted if recall.wanted else None,
    }
