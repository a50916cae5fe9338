"""Speed and memory beside transformers' own `generate`, on the same prompt in the same run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlite.bench.grid import fitting_prose
from kvlite.bench.llama_cpp import llama_cpp, require_llama_cpp
from kvlite.bench.options import SpeedOptions
from kvlite.bench.peers import require_one_card
from kvlite.bench.rows import Cells, Row, label
from kvlite.bench.task import Task, Work
from kvlite.cache import parse_kv_bits
from kvlite.config.settings import Settings
from kvlite.config.units import parse_number, readable
from kvlite.conversation.runner import Runner
from kvlite.errors import SettingError
from kvlite.memory.meter import TensorMeter
from kvlite.methods.budget import method_and_budget
from kvlite.model.gguf.index import gguf_alone
from kvlite.model.load import load_module, without_progress_lines
from kvlite.model.source import gguf_file
from kvlite.model.weights import PLAIN, Weights, held_tensors
from kvlite.offload.weights.loader import open_whole

TRANSFORMERS, LLAMA_CPP = PEERS = ("transformers", "llama.cpp")


@dataclass(frozen=True, kw_only=True)
class SpeedRow(Row):
    """One prompt, both programs; medians of the repetitions.

    Attributes:
        tokens: prompt length.
        method, budget, kv_bits: kvlite's.
        recall: entries that each token of an answer may bring back; "off" for no host store.
        prefill_s, reference_prefill_s: reading the prompt, to the first token.
        decode_s, reference_decode_s: one further token.
        prefill_ratio, decode_ratio: median over repetitions of kvlite's time over transformers',
            each pair measured back to back; below 1 is faster.
        peak_bytes, reference_peak_bytes: peak of live tensor bytes over the weights.
        kv_bytes, full_kv_bytes: kvlite's cache at the end, and one that drops nothing.
        llama_cpp_prefill_s, llama_cpp_decode_s: llama.cpp's times, if it was asked for.
    """

    KEY: ClassVar = ("tokens",)

    tokens: int
    method: str
    budget: str
    kv_bits: str
    recall: str
    prefill_s: float
    reference_prefill_s: float
    prefill_ratio: float
    decode_s: float
    reference_decode_s: float
    decode_ratio: float
    peak_bytes: int
    reference_peak_bytes: int
    kv_bytes: int
    full_kv_bytes: int
    llama_cpp_prefill_s: float | None = None
    llama_cpp_decode_s: float | None = None


@dataclass(kw_only=True)
class Speed(SpeedOptions, Task[SpeedRow]):
    """Time, peak and bytes beside transformers."""

    title: ClassVar = "Speed beside transformers"
    row: ClassVar = SpeedRow

    def __post_init__(self) -> None:
        """Raises SettingError if an option is not valid."""
        entries = 0 if self.recall == "off" else parse_number(self.recall, whole=True)
        if entries is None:
            raise SettingError(
                f"--recall {self.recall!r} is no number of entries: give 128, or off"
            )
        for peer in self.peer:
            if peer not in PEERS:
                raise SettingError(f"--peer {peer!r} is none of {', '.join(PEERS)}")
        if LLAMA_CPP in self.peer:
            require_llama_cpp()
        method_and_budget(self.method, self.budget)
        parse_kv_bits(self.kv_bits)
        self.entries = entries

    def settings(self, given: Settings) -> Settings:
        if LLAMA_CPP in self.peer and gguf_file(given.model) is None:
            raise SettingError(f"--peer llama.cpp needs a GGUF file, and --model is {given.model}")
        require_one_card(given, TRANSFORMERS)
        recall = "off" if self.recall == "off" else "ram"
        own = {"method": self.method, "budget": self.budget, "kv_bits": self.kv_bits}
        return given.replace({**own, "recall": recall, "recall_entries": self.entries})

    def work(self, runner: Runner) -> list[Work[SpeedRow]]:
        ids = fitting_prose(runner, max(self.tokens), self.new_tokens)
        reference = cache(partial(load_reference, runner))
        file = gguf_file(runner.settings.model) if LLAMA_CPP in self.peer else None
        repeats, count = self.repeats, self.new_tokens
        one = partial(compare, runner, reference, new_tokens=count, repeats=repeats, gguf=file)
        return [([(length,)], partial(one, ids[:length])) for length in self.tokens]

    def table(self, rows: Sequence[SpeedRow]) -> list[Cells]:
        return [
            {
                "tokens": f"{row.tokens:,}",
                "method": label(row.method, row.kv_bits),
                "budget": row.budget,
                "recall": row.recall,
                "reading": f"{row.prefill_s:.2f} s (x{row.prefill_ratio:.2f})",
                "a token": f"{1e3 * row.decode_s:.1f} ms (x{row.decode_ratio:.2f})",
                "peak": f"{readable(row.peak_bytes)} "
                f"(x{row.peak_bytes / row.reference_peak_bytes:.2f})",
                "KV": f"{readable(row.kv_bytes)} (x{row.kv_bytes / row.full_kv_bytes:.3f})",
                **_beside_llama_cpp(row),
            }
            for row in rows
        ]


def _beside_llama_cpp(row: SpeedRow) -> Cells:
    if row.llama_cpp_prefill_s is None or row.llama_cpp_decode_s is None:
        return {}
    return {
        "llama.cpp reading": f"{row.llama_cpp_prefill_s:.2f} s",
        "llama.cpp a token": f"{1e3 * row.llama_cpp_decode_s:.1f} ms",
    }


def load_reference(runner: Runner) -> Any:
    """The same weights as transformers runs them, with its own attention: SDPA, where it has that.
    Those of a GGUF file are unpacked. Experts that are kept packed are unpacked as here, for
    transformers would not keep them so."""
    model, weights = runner.model, runner.model.weights
    packed = weights.keeps_experts_packed(model.shape.model_type)
    if weights.packs:
        weights = Weights(
            next(name for name in PLAIN if PLAIN[name] == weights.dtype), weights.dtype
        )
    with without_progress_lines():
        opened = open_whole if packed or gguf_alone(model.path) else load_module
        module, _ = opened(model.path, device=model.device, weights=weights)
    module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")
    return module


def compare(
    runner: Runner,
    load: Callable[[], Any],
    ids: list[int],
    *,
    new_tokens: int,
    repeats: int,
    gguf: Path | None = None,
) -> Iterator[SpeedRow]:
    """Time reading and answering, in turn, with and without kvlite.

    Reading is timed to the first token's logits, a decode step as the mean of the others.

    Args:
        load: loads transformers' model, once.
        new_tokens: tokens each run generates, at least 3.
        gguf: the file for llama.cpp, if that is to be run in turn with both.
    """
    reference = load()
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for turn in range(repeats):
        if gguf is not None:
            with llama_cpp(gguf, len(ids) + new_tokens) as peer:
                others.append(peer.times(ids, new_tokens))
        # Taking turns at being first cancels what the first run of a pair pays.
        for first in (turn % 2 == 0, turn % 2 == 1):
            if first:
                theirs.append(_reference_times(reference, ids, new_tokens))
            else:
                ours.append(_our_times(runner, ids, new_tokens))
    peak = peak_over_weights(runner.model.module, lambda: runner.generate(ids, max_new_tokens=1))
    theirs_peak = peak_over_weights(reference, lambda: run_reference(reference, ids, 1))
    answer = runner.generate(ids, max_new_tokens=2, ignore_eos=True)
    yield SpeedRow(
        tokens=len(ids),
        method=answer.metrics.method,
        kv_bits=answer.metrics.kv_bits,
        budget=str(runner.settings.budget),
        recall="off" if runner.settings.recall == "off" else str(runner.settings.recall_entries),
        prefill_s=median(t for t, _ in ours),
        reference_prefill_s=median(t for t, _ in theirs),
        prefill_ratio=median(a / b for (a, _), (b, _) in zip(ours, theirs, strict=True)),
        decode_s=median(t for _, t in ours),
        reference_decode_s=median(t for _, t in theirs),
        decode_ratio=median(a / b for (_, a), (_, b) in zip(ours, theirs, strict=True)),
        peak_bytes=peak,
        reference_peak_bytes=theirs_peak,
        kv_bytes=answer.kv_bytes,
        full_kv_bytes=answer.full_kv_bytes,
        llama_cpp_prefill_s=median(t for t, _ in others) if others else None,
        llama_cpp_decode_s=median(t for _, t in others) if others else None,
    )


def _our_times(runner: Runner, ids: list[int], new_tokens: int) -> tuple[float, float]:
    # A decode step is timed, not how few of them an answer takes.
    given: dict[str, Any] = {"max_new_tokens": new_tokens, "speculate": "off"}
    metrics = runner.generate(ids, ignore_eos=True, **given).metrics
    return metrics.time_to_first_token_s, 1 / metrics.decode_tokens_per_s


class _Clock:
    """A logits processor that notes when each token was due."""

    def __init__(self) -> None:
        self.times = [perf_counter()]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if scores.device.type == "cuda":
            torch.cuda.synchronize(scores.device)
        self.times.append(perf_counter())
        return scores


def _reference_times(reference: Any, ids: list[int], new_tokens: int) -> tuple[float, float]:
    clock = _Clock()
    run_reference(reference, ids, new_tokens, clock)
    start, first, *rest = clock.times
    return first - start, (rest[-1] - first) / len(rest)


def run_reference(
    reference: Any, ids: list[int], new_tokens: int, clock: _Clock | None = None
) -> None:
    """Read a prompt and answer greedily, as transformers does it."""
    from transformers import LogitsProcessorList

    prompt = torch.tensor([ids], device=reference.device)
    with torch.no_grad():
        reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([clock] if clock else []),
        )


def peak_over_weights(model: Any, run: Callable[[], object]) -> int:
    """Peak bytes over a model's weights during `run`: the allocator's on CUDA, live tensor
    storage elsewhere."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return int(torch.cuda.max_memory_allocated()) - before
    meter = TensorMeter(held_tensors(model))
    weights = meter.live
    with meter:
        run()
    return meter.peak - weights
