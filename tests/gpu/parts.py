"""What is owed to a GPU, a generator of rows for each question, the most valuable first.

Each is to end within three minutes on a card. Times are medians unless a row says otherwise.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import kvlite
from kvlite.conversation.metrics import GenerationMetrics
from kvlite.conversation.runner import Runner
from kvlite.engine.cuda_graph import GraphDecoder
from kvlite.errors import KvliteError
from kvlite.methods import METHODS
from kvlite.ops.attention import attend
from kvlite.ops.softmax import Softmax
from tests.conftest import ARCHITECTURES, make_tiny
from tests.gpu.models import Place, save_random

Row = dict[str, Any]
Part = Callable[[Place], Iterator[Row]]

# Tests that run on whatever device there is.
SUITES = (
    "tests/test_triton_attention.py",
    "tests/test_triton_ragged.py",
    "tests/test_triton_search.py",
    "tests/test_triton_recall.py",
    "tests/test_pinned.py",
    "tests/test_kv_transfer.py",
    "tests/test_host_scores.py",
)
WAYS: tuple[dict[str, Any], ...] = (
    {"method": "full", "recall": "off"},
    {"method": "spans", "recall": "off"},
    {"method": "spans", "recall": "ram"},
    {"method": "spans", "recall": "off", "kv_bits": "4"},
    {"method": "spans", "recall": "ram", "kv_bits": "4"},
    {"method": "kvx", "recall": "off"},
    {"method": "simlayerkv+kvx", "recall": "off"},
    {"method": "uncomp", "recall": "off"},
)
# Steps that are programs of other kinds, and draw.
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 1}
PROGRAMS: tuple[dict[str, Any], ...] = (
    *WAYS,
    {"method": "spans", "recall": "off", **DRAWN},
    {"method": "h2o", "recall": "off"},
    {"method": "h2o", "recall": "ram", **DRAWN},
    {"method": "streaming", "recall": "off", "kv_bits": "4"},
    {"method": "lminfinite", "recall": "off"},
    {"method": "tova", "recall": "off"},
)


def equality(place: Place) -> Iterator[Row]:
    """Does `full` give transformers' tokens on the device, on every architecture?"""
    ids = list(range(3, 83))
    for name in sorted(ARCHITECTURES)[: 3 if place.rehearsal else None]:
        tiny = make_tiny(name, place.device.type)
        runner = place.runner(tiny.model, method="full", recall="off")
        ours = runner.generate(ids, max_new_tokens=32, ignore_eos=True).token_ids
        prompt = torch.tensor([ids], device=place.device)
        with torch.no_grad():
            theirs = tiny.reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=32,
                do_sample=False,
                eos_token_id=None,
            )
        yield {"architecture": name, "equal": ours == theirs[0, len(ids) :].tolist()}


def methods(place: Place) -> Iterator[Row]:
    """Does every method say on the device what it says on a CPU, with every kind of cache?"""
    models = [make_tiny("llama", kind).model for kind in (place.device.type, "cpu")]
    ids = list(range(3, 123))
    for name in list(METHODS)[: 2 if place.rehearsal else None]:
        for bits in ("16", "8", "4"):
            for recall in ("off", "ram"):
                given = {"method": name, "kv_bits": bits, "recall": recall, "budget": "48"}
                row = {"method": name, "bits": bits, "recall": recall}
                try:
                    said = [
                        place.runner(model, **given).generate(ids, 24, ignore_eos=True).token_ids
                        for model in models
                    ]
                except KvliteError as error:
                    yield {**row, "equal": None, "refused": str(error)}
                    continue
                yield {**row, "equal": said[0] == said[1]}


def suites(place: Place) -> Iterator[Row]:
    """Do the tests of kernels, copies and choices pass on the device?"""
    for file in SUITES[: 1 if place.rehearsal else None]:
        collect = ["--collect-only"] if place.rehearsal else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *collect, file]
        begun = perf_counter()
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.findall(r"(\d+) (passed|failed)", ran.stdout)
        counted = {word: int(count) for count, word in found}
        yield {
            "tests": file,
            "passed": counted.get("passed", 0),
            "failed": counted.get("failed", 0),
            "exit code": ran.returncode,
            "s": perf_counter() - begun,
        }


def attention(place: Place) -> Iterator[Row]:
    """How exact, and how near to memory's speed, is one token's attention?"""
    heads, kv_heads, dim = (32, 8, 128) if not place.rehearsal else (4, 2, 16)
    bandwidth = measured_bandwidth(place)
    for entries in (place.short, place.long, place.longest):
        q, k, v = (
            torch.randn(1, count, length, dim, device=place.device, dtype=place.dtype)
            for count, length in ((heads, 1), (kv_heads, entries), (kv_heads, entries))
        )
        scale = dim**-0.5
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
        functions: dict[str, Callable[[], Any]] = {
            "attend": partial(attend, q, k, v, Softmax(scale), causal=False),
            "SDPA": partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True),
        }
        for name, work in functions.items():
            seconds, made = timed(work, place), work()
            out = made[0] if isinstance(made, tuple) else made
            yield {
                "entries": entries,
                "function": name,
                "largest error": float((out.double() - exact).abs().max()),
                "us": 1e6 * seconds,
                "share of bandwidth": (k.nbytes + v.nbytes) / seconds / bandwidth,
            }


def speed(place: Place) -> Iterator[Row]:
    """What do reading and a token take, as shares of memory's speed, and is the plan right?"""
    bandwidth, model = measured_bandwidth(place), place.large_model()
    weights = sum(model.shape.weight_bytes(model.weights).values())
    place.runner(model, method="full").generate(place.tokens(64), 4, ignore_eos=True)
    for length in (place.short, place.long):
        for way in WAYS:
            answer = place.runner(model, **way).generate(
                place.tokens(length), place.answer, ignore_eos=True
            )
            yield {"tokens": length, **way, **figures(answer.metrics, weights, bandwidth)}


def graphs(place: Place) -> Iterator[Row]:
    """Do CUDA graphs give the tokens of plain steps, and what do they save?"""
    model = place.large_model()
    for way in PROGRAMS[: 3 if place.rehearsal else None]:
        runner, row = place.runner(model, **way), {"tokens": place.short, **way}
        ids = place.tokens(place.short)
        answers = [runner.generate(ids, place.answer, ignore_eos=True)]
        with patch.object(GraphDecoder, "step", lambda *_, **__: None):
            answers.append(runner.generate(ids, place.answer, ignore_eos=True))
        metrics, plain = (answer.metrics for answer in answers)
        row["graph's tokens"], row["no graph"] = metrics.graph_steps, metrics.no_graph
        row["a token, ms"] = times(metrics)["a token, ms"]
        row["without, ms"] = times(plain)["a token, ms"]
        yield {**row, "equal": answers[0].token_ids == answers[1].token_ids}


def beside_transformers(place: Place) -> Iterator[Row]:
    """How long does transformers take for the same, with the same weights?"""
    model = place.large_model()
    module = model.module
    for length in (place.short, place.long):
        ids = torch.tensor([place.tokens(length)], device=place.device)
        answer = place.runner(model, method="full", recall="off").generate(
            ids[0].tolist(), place.answer, ignore_eos=True
        )
        yield {"tokens": length, "program": "kvlite, full", **times(answer.metrics)}
        for attention_function in ("sdpa", "flash_attention_2"):
            try:
                module.set_attn_implementation(attention_function)
                reading, token = transformers_times(module, ids, place)
            except (ImportError, ValueError, torch.OutOfMemoryError) as error:
                row = {"refused": str(error).splitlines()[0]}
            else:
                row = {"reading, s": reading, "a token, ms": 1e3 * token}
            finally:
                module.set_attn_implementation("kvlite")
            yield {"tokens": length, "program": f"transformers, {attention_function}", **row}


def long_documents(place: Place) -> Iterator[Row]:
    """Within 24 GB: what do the longest document, a further question and a token take?"""
    with capped(place):
        bandwidth, model = measured_bandwidth(place), place.large_model()
        weights = sum(model.shape.weight_bytes(model.weights).values())
        for recall in ("ram", "off"):
            talk = place.runner(model, method="spans", recall=recall).conversation()
            asked = (("document", place.longest), ("further question", 32))
            for turn, (name, count) in enumerate(asked):
                answer = talk.generate(place.tokens(count, turn), ignore_eos=True)
                row = {"recall": recall, "turn": name, "tokens": count}
                yield {**row, **figures(answer.metrics, weights, bandwidth)}


def out_of_memory(place: Place) -> Iterator[Row]:
    """Does an answer go on when another program takes memory in the middle of it?"""
    if place.device.type != "cuda":
        yield {"skipped": "a CPU's memory cannot be taken away"}
        return
    model = place.large_model()
    total = torch.cuda.get_device_properties(place.device).total_memory
    for spare in (64 << 20, 1 << 20, 0):
        talk = place.runner(model, method="full", max_new_tokens=256).conversation()
        said, metrics = 0, None
        for piece in talk.stream(" ".join(map(str, place.tokens(place.short)))):
            said, metrics = said + 1, piece.metrics
            if said == 8:
                held = torch.cuda.memory_reserved(place.device) + spare
                torch.cuda.set_per_process_memory_fraction(held / total)
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert metrics is not None
        yield {
            "spare, MiB": spare >> 20,
            "tokens": said,
            "ended by": metrics.finish_reason,
            "given up": "; ".join(metrics.fallbacks),
        }


def quantized_weights(place: Place) -> Iterator[Row]:
    """Do quantized weights take the bytes stated, and how fast are they?"""
    bandwidth = measured_bandwidth(place)
    with tempfile.TemporaryDirectory() as folder:
        save_random(place.small, Path(folder), place.device)
        for name in ("bf16", "nf4", "int8"):
            if name != "bf16" and importlib.util.find_spec("bitsandbytes") is None:
                yield {"weights": name, "skipped": "bitsandbytes is not installed"}
                continue
            before, begun = allocated(place), perf_counter()
            runner = loaded(folder, place, weights=name)
            seconds, held = perf_counter() - begun, allocated(place) - before
            stated = sum(runner.shape.weight_bytes(runner.model.weights).values())
            answer = runner.generate(place.tokens(place.short), place.answer, ignore_eos=True)
            row = {"weights": name, "loading, s": seconds, "MiB stated": stated / 2**20}
            row["MiB allocated"] = held / 2**20
            yield {**row, **figures(answer.metrics, stated, bandwidth)}
            del runner, answer
            empty(place)


def streamed_weights(place: Place) -> Iterator[Row]:
    """How fast do weights come to the device layer by layer?"""
    with tempfile.TemporaryDirectory() as folder:
        save_random(place.small, Path(folder), place.device)
        for stream in ("off", "ram", "disk"):
            try:
                runner = loaded(folder, place, stream=stream, weights="bf16")
            except KvliteError as error:
                yield {"stream": stream, "refused": str(error)}
                continue
            answer = runner.generate(place.tokens(place.short), place.answer, ignore_eos=True)
            passing = runner.model.layers.passing
            row = {"stream": stream, **times(answer.metrics)}
            if passing is not None:
                row["GB/s"] = passing.bytes_per_s / 1e9
            yield row


def saved_conversations(place: Place) -> Iterator[Row]:
    """How long do saving and opening take, and does what was opened answer alike?"""
    model = place.large_model()
    runner = place.runner(model, method="spans", recall="ram", max_new_tokens=place.answer)
    talk = runner.conversation()
    talk.generate(place.tokens(place.long), ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        path, begun = Path(folder) / "talk.kv", perf_counter()
        talk.save(path)
        saving, begun = perf_counter() - begun, perf_counter()
        opened = runner.open(path)
        opening, size = perf_counter() - begun, path.stat().st_size
    question = place.tokens(16, 1)
    said = [each.generate(question, ignore_eos=True).token_ids for each in (talk, opened)]
    yield {
        "tokens": place.long,
        "saving, s": saving,
        "opening, s": opening,
        "GiB": size / 2**30,
        "equal": said[0] == said[1],
    }


def choosing(place: Place) -> Iterator[Row]:
    """What does choosing on the host save, and what does it take?"""
    model = place.large_model()
    for scores in ("device", "host", "host-softmax"):
        answer = place.runner(model, method="snapkv", recall="off", scores=scores).generate(
            place.tokens(place.long), 4, ignore_eos=True
        )
        metrics = answer.metrics
        row = {"tokens": place.long, "scores": scores, "reading, s": metrics.time_to_first_token_s}
        yield {**row, "peak, GiB": metrics.peak_bytes / 2**30, "choosing, s": metrics.score_s}


PARTS: dict[str, Part] = {
    part.__name__: part
    for part in (
        equality,
        methods,
        suites,
        attention,
        speed,
        graphs,
        beside_transformers,
        long_documents,
        out_of_memory,
        quantized_weights,
        streamed_weights,
        saved_conversations,
        choosing,
    )
}


def times(metrics: GenerationMetrics) -> Row:
    """Seconds to the first token, and milliseconds of a further one."""
    rate = metrics.decode_tokens_per_s
    reading = metrics.time_to_first_token_s
    return {"reading, s": reading, "a token, ms": 1e3 / rate if rate else None}


def figures(metrics: GenerationMetrics, weights: int, bandwidth: float) -> Row:
    """`times`, with what a token has to read from memory as a share of its speed, the peak, and
    how far it was from the plan's."""
    row, rate = times(metrics), metrics.decode_tokens_per_s
    share = (weights + metrics.kv_bytes) * rate / bandwidth if rate else None
    return {
        **row,
        "share of bandwidth": share,
        "peak, GiB": metrics.peak_bytes / 2**30,
        "plan's error": metrics.plan_error,
    }


def loaded(folder: str, place: Place, **settings: Any) -> Runner:
    """A model from a folder, on the device."""
    given = {"budget": str(place.budget), "temperature": 0.0, "recall": "off", **settings}
    return kvlite.load(folder, device=place.device.type, **given)


def transformers_times(module: Any, ids: Tensor, place: Place) -> tuple[float, float]:
    """Seconds that transformers takes to read, and for a token."""
    seconds = []
    for count in (1, 1, place.answer):  # the first warms up
        begun = perf_counter()
        module.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
        synchronize(place)
        seconds.append(perf_counter() - begun)
    return seconds[1], (seconds[2] - seconds[1]) / (place.answer - 1)


def measured_bandwidth(place: Place) -> float:
    """Bytes a second that a large copy reads and writes."""
    size = 1 << (20 if place.rehearsal else 30)
    source = torch.empty(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), place)


def timed(work: Callable[[], Any], place: Place, rounds: int = 20) -> float:
    """Median seconds of a call that is made over and over."""
    seconds = []
    for _ in range(3 + rounds):
        synchronize(place)
        begun = perf_counter()
        work()
        synchronize(place)
        seconds.append(perf_counter() - begun)
    return median(seconds[3:])


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
