"""What a turn takes as it goes on: time, memory, weights that come, entries that come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from kvlite.memory.meter import PeakMeter
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore, Recall


class RunStats:
    """What one turn takes.

    Attributes:
        meter: of its memory.
        planned_phases: the peak that each phase is expected to have, in bytes of live tensors;
            none where that is not known.
        generated: tokens that were drawn.
        streamed: bytes of weights that came to the device.
        read_s, first_s, last_s: seconds from its beginning until all was read, and until the first
            token and the last one so far; 0 before.
    """

    def __init__(self, started: float, meter: PeakMeter) -> None:
        """Begin with a turn.

        Args:
            started: when it did, by `perf_counter`.
        """
        self.started = started
        self.meter = meter
        self.planned_phases: dict[str, int] = {}
        self.generated = 0
        self.streamed = 0
        self.read_s = 0.0
        self.first_s = 0.0
        self.last_s = 0.0

    @property
    def planned(self) -> int | None:
        """The highest peak expected of any phase; None if that is not known."""
        return max(self.planned_phases.values(), default=None)

    @contextmanager
    def work(self, model: LoadedModel) -> Iterator[None]:
        """Around all work of a model, which may begin to stream meanwhile: what it takes is this
        turn's."""
        before = model.layers.brought
        with self.meter.probe():
            yield
        self.streamed += model.layers.brought - before

    def was_read(self) -> None:
        """All tokens were."""
        self.meter.end_phase("read")
        self.read_s = perf_counter() - self.started

    def was_drawn(self) -> None:
        """A token was."""
        self.generated += 1
        self.last_s = perf_counter() - self.started
        self.first_s = self.first_s or self.last_s

    def begin_again(self) -> None:
        """The answer is forgotten, and another one begins as soon as the first one did."""
        self.generated, self.first_s = 0, 0.0
        self.started = perf_counter() - self.read_s

    def figures(self, read: int, *, ended: bool) -> dict[str, Any]:
        """The metrics's, by name.

        Args:
            read: tokens that were, those of an earlier answer included.
            ended: whether the answer did.
        """
        decoding, peak, planned = self.last_s - self.first_s, self.meter.peak_bytes, self.planned
        if ended:
            self.meter.end_phase("answer")
        return {
            "generated_tokens": self.generated,
            "streamed_bytes": self.streamed,
            "peak_bytes": peak,
            "planned_peak_bytes": planned,
            "phase_peak_bytes": self.meter.phases,
            "planned_phase_bytes": self.planned_phases,
            "plan_error": planned / peak - 1 if planned and self.meter.of_tensors else None,
            "time_to_first_token_s": self.first_s,
            "prefill_tokens_per_s": read / self.read_s,
            "decode_tokens_per_s": (self.generated - 1) / decoding if decoding > 0 else 0.0,
        }


def recalled(store: HostKVStore | None, recall: Recall | None, entry_bytes: int) -> dict[str, Any]:
    """The metrics's figures of recall, by name.

    Args:
        store, recall: of the turn, if it recalls.
        entry_bytes: of an entry of one KV head.
    """
    if store is None or recall is None:
        return {
            "index_bytes": 0,
            "host_kv_bytes": 0,
            "host_kv_place": "",
            "recalled_bytes": 0,
            "recall_hit_rate": None,
        }
    return {
        "index_bytes": store.index_bytes,
        "host_kv_bytes": store.nbytes,
        "host_kv_place": store.place,
        "recalled_bytes": recall.brought * entry_bytes,
        "recall_hit_rate": 1 - recall.brought / recall.wanted if recall.wanted else None,
    }
