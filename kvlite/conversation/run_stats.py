"""What a turn takes: time, memory, planned and measured, streamed weights, recalled entries."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvlite.cache.segment import bytes_held
from kvlite.engine.passage_attention import watched
from kvlite.engine.slices import SLICE_S, Slices, T
from kvlite.errors import ForecastError
from kvlite.memory.meter import PeakMeter
from kvlite.model.load import LoadedModel
from kvlite.planner.forecast import Task, forecast
from kvlite.planner.meta import meta
from kvlite.planner.meta_model import meta_model_of
from kvlite.planner.peaks import Moment

if TYPE_CHECKING:
    from kvlite.conversation.turn import Turn

# Seconds after which a part of a reading is slow; and that others, if any, use between two slices.
SLOW_S, BESIDE_S = SLICE_S, 0.02


class RunStats:
    """What one turn takes.

    Attributes:
        planned_phases: the planned peak of each phase, in bytes of live tensors; empty if unknown.
        generated: tokens sampled.
        streamed: bytes of weights that came to the device.
        read_s, first_s, last_s: seconds from `started` until everything was read, the first token
            and the latest token; 0 before that.
        before: tokens of the same prompt that another turn read.
        others_s: seconds that others had between slices; not in `read_s`.
    """

    def __init__(self, started: float, meter: PeakMeter) -> None:
        self.started = started
        self.meter = meter
        self.planned_phases: dict[str, int] = {}
        self.generated = 0
        self.streamed = 0
        self.before = 0
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
        this work's layer comes once more. A step is sent the seconds of the one before it if that
        was longer than a slice and others used the time between slices."""
        slow: float | None = None
        beside = False
        try:
            while True:
                end = perf_counter() + SLICE_S
                with self.work(model):
                    try:
                        while True:
                            began = perf_counter()
                            steps.send(slow)
                            now = perf_counter()
                            slow = now - began if beside and now - began > SLOW_S else None
                            if now >= end and model.layers.passing is None:
                                break
                    except StopIteration as last:
                        result: T = last.value
                        return result
                left = perf_counter()
                unwanted = (yield) or 0.0
                others = perf_counter() - left - unwanted
                self.started += unwanted
                self.others_s += others
                beside = others > BESIDE_S
        finally:
            with self.work(model):
                steps.close()

    def go_on_from(self, other: "RunStats", tokens: int) -> None:
        """Count as well how another turn read so many tokens of the same prompt before."""
        self.before, self.streamed = other.before + tokens, other.streamed
        self.started, self.others_s = other.started, other.others_s

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

    def counted(self) -> dict[str, Any]:
        """Fields of `GenerationMetrics`, of this moment."""
        decoding = self.last_s - self.first_s
        return {
            "generated_tokens": self.generated,
            "streamed_bytes": self.streamed,
            "time_to_first_token_s": self.first_s,
            "decode_tokens_per_s": (self.generated - 1) / decoding if decoding > 0 else 0.0,
        }


def planned_phases(turn: "Turn") -> dict[str, int]:
    """The planned peak of each phase of a turn, from its own cache, policies and host store, in
    bytes of live tensors; empty if unknown."""
    model = turn.model
    task = Task(
        new=len(turn.again) + len(turn.ids),
        longest=turn.turn_config.planned,
        known=len(turn.token_ids) - len(turn.again),
        chunk=turn.chunk,
        recalled=0 if turn.store is None else turn.settings.recall_entries,
    )
    store = None if turn.store is None else meta(replace(turn.store, transfers={}, disk=None))
    cache = meta(turn.cache)
    cache.queries = watched(model.shape) if turn.watches else {}
    try:
        made = forecast(meta_model_of(model), cache, turn.policies, task, store)
    except ForecastError:
        return {}
    weights, cards = bytes_held(model.tensors()), len(model.all_devices)

    def peak(moment: Moment) -> int:
        """The sum of all cards' peaks: each card has its own layers, and works on them in turn."""
        return weights + moment.kv + cards * (moment.total - moment.kv)

    return {"read": max(map(peak, (made.reading, made.choosing))), "answer": peak(made.answering)}


def wanted_bytes(turn: "Turn") -> int:
    """Bytes of the device that a turn is planned to take beside what there is now."""
    index = [] if turn.store is None else turn.store.index_tensors
    held = bytes_held(chain(turn.model.tensors(), turn.cache.tensors, index))
    return max(0, (turn.run_stats.planned or 0) - held)
