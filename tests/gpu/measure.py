"""How parts measure: rows of what was tried, times, and which kernels took them."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import GenerationMetrics, Piece
from tests.gpu.models import Place

# How often a call is timed, and calls that are timed together.
ROUNDS, RECORDED = 20, 10

Row = dict[str, Any]
Part = Callable[[Place], Iterator[Row]]


def attempted(row: Row, work: Callable[[], Row]) -> Row:
    """A row with what the work found, or with what it failed by."""
    try:
        return {**row, **work()}
    except Exception as error:
        return {**row, "failed": told(error)}


def told(error: Exception) -> str:
    """A line about an error, which is written to stderr as a whole."""
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    at = next((each for each in reversed(frames) if "kvlite" in each.filename), frames[-1])
    lines = str(error).strip().splitlines() or [""]
    place = f"{Path(at.filename).name}:{at.lineno}"
    return f"{type(error).__name__} at {place}: {lines[0][:200]}"


@dataclass(frozen=True)
class Said:
    """An answer: its tokens, the metrics, and the median of milliseconds between two tokens."""

    tokens: list[int]
    metrics: GenerationMetrics
    between_ms: float

    def alike(self, other: "Said") -> int:
        """How many tokens are those of another answer, at their places."""
        return sum(own == others for own, others in zip(self.tokens, other.tokens, strict=True))


def answered(place: Place, talk: Conversation, ids: Sequence[int]) -> Said:
    """An answer of full length."""
    pieces, came = list[Piece](), list[float]()
    for piece in talk.stream_tokens(ids, max_new_tokens=place.answer, ignore_eos=True):
        pieces.append(piece)
        came.append(perf_counter())
    between = [1e3 * (after - before) for before, after in pairwise(came)]
    tokens = [piece.token_id for piece in pieces if piece.token_id is not None]
    return Said(tokens, pieces[-1].metrics, median(between))


def timed(work: Callable[[], Any], place: Place) -> float:
    """Median seconds of a call on the device, without what it takes the host to launch it."""
    if place.device.type != "cuda":
        return _median_seconds(work, place)
    return _median_seconds(_recorded(work, place), place) / RECORDED


def _median_seconds(work: Callable[[], Any], place: Place) -> float:
    seconds = []
    for _ in range(3 + ROUNDS):
        synchronize(place)
        begun = perf_counter()
        work()
        synchronize(place)
        seconds.append(perf_counter() - begun)
    return median(seconds[3:])


def _recorded(work: Callable[[], Any], place: Place) -> Callable[[], Any]:
    """Some calls as one graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    synchronize(place)
    with torch.cuda.graph(graph):
        for _ in range(RECORDED):
            work()
    return graph.replay


def synchronize(place: Place) -> None:
    """Wait for the device."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def allocated(place: Place) -> int:
    """Bytes that torch has given out on the device."""
    return torch.cuda.memory_allocated(place.device) if place.device.type == "cuda" else 0


def empty(place: Place) -> None:
    """Give back what is not used."""
    if place.device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def capped(place: Place) -> Iterator[None]:
    """While no more of the card can be taken than a card of 24 GB has."""
    if place.device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, place.cap / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def measured_bandwidth(place: Place) -> float:
    """Bytes a second that a large copy reads and writes; a graph would have it made by slower
    means."""
    size = 1 << (20 if place.rehearsal else 30)
    source = torch.empty(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), place)


def times(said: Said) -> Row:
    """Seconds to the first token, and milliseconds of a further one: with what goes before the
    first step of a kind, and in between; why the last one was no graph's."""
    rate = said.metrics.decode_tokens_per_s
    return {
        "reading, s": said.metrics.time_to_first_token_s,
        "a token, ms": 1e3 / rate if rate else None,
        "median, ms": said.between_ms,
        "no graph": said.metrics.no_graph,
    }


def figures(said: Said, weights: int, bandwidth: float) -> Row:
    """`times`, with what a token has to read from memory as a share of its speed, the peak, and
    how far it was from the plan's."""
    metrics = said.metrics
    return {
        **times(said),
        "share of bandwidth": (weights + metrics.kv_bytes) / bandwidth / said.between_ms * 1e3,
        "peak, GiB": metrics.peak_bytes / 2**30,
        "plan's error": metrics.plan_error,
    }


def profiled(work: Callable[[], Any]) -> tuple[Any, float]:
    """What ran on the device, and how long it all took."""
    on_device = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CUDA if on_device else activity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        begun = perf_counter()
        work()
        if on_device:
            torch.cuda.synchronize()
        seconds = perf_counter() - begun
    return profile, seconds


def kernel_rows(row: Row, profile: Any, seconds: float, rounds: int) -> Iterator[Row]:
    """All together, and the twelve that take longest; times in microseconds a round."""
    every = [
        (each.self_device_time_total or each.self_cpu_time_total, each.count, each.key)
        for each in profile.key_averages()
        if each.device_type.name == "CUDA" or not torch.cuda.is_available()
    ]
    every.sort(reverse=True)
    yield {
        **row,
        "kernel": "all",
        "launches": sum(count for _, count, _ in every) / rounds,
        "us": sum(time for time, _, _ in every) / rounds,
        "us with waits": 1e6 * seconds / rounds,
    }
    for time, count, name in every[:12]:
        yield {**row, "kernel": name[:70], "launches": count / rounds, "us": time / rounds}
