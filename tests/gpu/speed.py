"""How fast is the device, beside its memory's speed and beside transformers?"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.cache.segment import bytes_held
from kvlite.conversation import run_stats
from kvlite.conversation.steps_together import StepsTogether
from kvlite.engine import speculate
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.cuda_graph import GraphDecoder
from kvlite.engine.prompt_lookup import PromptLookup
from kvlite.engine.sampling import Sampler
from kvlite.engine.speculate import Pace
from kvlite.model.load import LoadedModel
from kvlite.ops.attention import attend, attend_causal, attend_ragged
from kvlite.ops.blocks import FORMATS
from kvlite.ops.softmax import Softmax
from kvlite.server import answering
from tests.gpu.measure import (
    Row,
    answered,
    attempted,
    figures,
    kernel_rows,
    measured_bandwidth,
    profiled,
    synchronize,
    timed,
    times,
    told,
)
from tests.gpu.models import Place, pack_at_random
from tests.oracles.packed import blocks
from tests.served import served

WAYS: tuple[dict[str, Any], ...] = (
    {"method": "full", "recall": "off"},
    {"method": "spans", "recall": "off"},
    {"method": "spans", "recall": "ram"},
    {"method": "spans", "recall": "off", "kv_bits": "4"},
    {"method": "spans", "recall": "ram", "kv_bits": "4"},
    {"method": "kvx", "recall": "off"},
    {"method": "h2o", "recall": "off"},
    {"method": "simlayerkv+kvx", "recall": "off"},
    {"method": "uncomp", "recall": "off"},
)
# Steps that are programs of other kinds, and draw.
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 1}
PROGRAMS: tuple[dict[str, Any], ...] = (
    *WAYS,
    {"method": "spans", "recall": "off", **DRAWN},
    {"method": "h2o", "recall": "ram", **DRAWN},
    {"method": "streaming", "recall": "off", "kv_bits": "4"},
    {"method": "lminfinite", "recall": "off"},
    {"method": "tova", "recall": "off"},
)


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
        softmax = Softmax(scale)
        starts = entries * torch.arange(kv_heads, device=place.device)
        flat = k.view(1, -1, dim), v.view(1, -1, dim), starts, starts + entries - 1, entries
        of_heads = q.view(1, kv_heads, -1, dim)
        functions: dict[str, Callable[[], Any]] = {
            "attend": partial(attend, q, k, v, softmax, causal=False),
            "attend_ragged": partial(attend_ragged, of_heads, *flat, softmax),
            "SDPA": partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True),
        }
        for name, work in functions.items():
            seconds, made = timed(work, place), work()
            out = (made[0] if isinstance(made, tuple) else made).view_as(exact)
            yield {
                "entries": entries,
                "function": name,
                "largest error": float((out.double() - exact).abs().max()),
                "us": 1e6 * seconds,
                "share of bandwidth": (k.nbytes + v.nbytes) / seconds / bandwidth,
            }


def chunks(place: Place) -> Iterator[Row]:
    """What would attention of a chunk take as one call, whose mask ends at the lower right?"""
    if place.device.type != "cuda":
        yield {"skipped": "the call is CUDA's"}
        return
    heads, kv_heads, dim = 32, 8, 128
    for length, entries in ((1056, place.short), (1056, place.long), (4096, place.long)):
        q, k, v = (
            torch.randn(1, count, size, dim, device=place.device, dtype=place.dtype)
            for count, size in ((heads, length), (kv_heads, entries), (kv_heads, entries))
        )
        mask = torch.ones(length, entries, dtype=torch.bool, device=place.device)
        mask.tril_(entries - length)
        rows = slice(length - 64, length)  # of all rows float64 takes too much
        exact = F.scaled_dot_product_attention(
            *(each.double() for each in (q[:, :, rows], k, v)), mask[rows], enable_gqa=True
        )
        flash, softmax = torch.ops.aten._scaled_dot_product_flash_attention, Softmax(dim**-0.5)
        functions: dict[str, Callable[[], Any]] = {
            "attend_causal": partial(attend_causal, q, k, v, softmax),
            "one call": partial(flash, q, k, v, 0.0, True, False, scale=softmax.scale),
        }
        for name, work in functions.items():

            def measured(work: Callable[[], Any] = work, exact: Tensor = exact) -> Row:
                error = (work()[0][:, :, -64:].double() - exact).abs().max()
                return {"largest error": float(error), "us": 1e6 * timed(work, place)}

            yield attempted({"rows": length, "entries": entries, "function": name}, measured)


def products(place: Place) -> Iterator[Row]:
    """How exact, and how near to memory's speed, are products of a token with packed weights?"""
    if place.device.type != "cuda":
        yield {"skipped": "the kernels are for CUDA"}
        return
    from kvlite.ops import triton_linear

    bandwidth, (outputs, inputs) = measured_bandwidth(place), (14_336, 4096)
    rows = torch.randn(1, inputs, device=place.device, dtype=place.dtype)

    def measured(kind: str) -> Row:
        form = FORMATS[kind]
        # More than the processor's cache holds.
        every = [blocks(kind, outputs, inputs).to(place.device) for _ in range(4)]
        plain = torch.empty(outputs, inputs, device=place.device)
        triton_linear.unpack(every[0], form, plain)
        exact = rows.double() @ plain.double().T
        error = (triton_linear.multiply(rows, every[0], form).double() - exact).abs().max()
        seconds = timed(
            lambda: [triton_linear.multiply(rows, each, form) for each in every], place
        ) / len(every)
        return {
            "error": float(error / exact.abs().max()),
            "us": 1e6 * seconds,
            "share of bandwidth": every[0].nbytes / seconds / bandwidth,
        }

    def of_experts(kind: str) -> Row:
        form, (count, outputs, inputs) = FORMATS[kind], (128, 1536, 2048)
        row = torch.randn(1, inputs, device=place.device, dtype=place.dtype)
        packed = blocks(kind, count * outputs, inputs).view(count, outputs, -1).to(place.device)
        # Others each time, of more than the processor's cache holds.
        every = torch.arange(count, device=place.device).view(-1, 8)
        seconds = timed(
            lambda: [triton_linear.multiply(row, packed, form, chosen) for chosen in every], place
        ) / len(every)
        read = packed.nbytes // len(every)
        return {"us": 1e6 * seconds, "share of bandwidth": read / seconds / bandwidth}

    for kind in FORMATS:
        yield attempted({"weights": kind}, partial(measured, kind))
        yield attempted({"8 experts' weights": kind}, partial(of_experts, kind))


def speed(place: Place) -> Iterator[Row]:
    """What do reading and a token take, as shares of memory's speed, and is the plan right?"""
    bandwidth, model = measured_bandwidth(place), place.large_model()
    weights = sum(model.shape.weight_bytes(model.weights).values())

    def measured(length: int, way: dict[str, Any]) -> Row:
        said = answered(place, place.runner(model, **way).conversation(), place.tokens(length))
        return figures(said, weights, bandwidth)

    for length in (place.short, place.long):
        for way in WAYS:
            if length == place.short:  # what is compiled or set up at first use
                attempted({}, partial(measured, length, way))
            yield attempted({"tokens": length, **way}, partial(measured, length, way))


def other_weights(place: Place) -> Iterator[Row]:
    """What does a token take with weights packed as GGUF files have them, and with experts?"""
    bandwidth = measured_bandwidth(place)

    def measured(kind: str) -> Row:
        model = place.experts_model() if kind == "experts" else place.large_model()
        if kind in FORMATS:
            pack_at_random(model.module.model.layers, FORMATS[kind], place.dtype)
        weights = bytes_held(model.tensors())
        if kind == "experts":
            stacks = sum(each.nbytes for each in model.module.parameters() if each.dim() == 3)
            config = model.module.config
            weights -= stacks - stacks * config.num_experts_per_tok // config.num_experts
        row: Row = {"GiB that a token reads": weights / 2**30}
        for _ in range(2):  # the first warms up
            runner = place.runner(model, method="full", recall="off")
            said = answered(place, runner.conversation(), place.tokens(place.short))
        with patch.object(GraphDecoder, "step", lambda *_, **__: None):
            plain = answered(place, runner.conversation(), place.tokens(place.short))
        return {**row, **figures(said, weights, bandwidth), "without graphs, ms": plain.between_ms}

    for kind in ("Q4_0", *([] if place.rehearsal else ["Q4_K"]), "experts"):
        yield attempted({"weights": kind}, partial(measured, kind))


def graphs(place: Place) -> Iterator[Row]:
    """Do CUDA graphs give the tokens of plain steps, and what do they save?"""
    model = place.large_model()

    def compared(way: dict[str, Any]) -> Row:
        runner, ids = place.runner(model, **way), place.tokens(place.short)
        answered(place, runner.conversation(), ids)  # what is compiled or set up at first use
        said = answered(place, runner.conversation(), ids)
        with patch("kvlite.conversation.turn.graph_decoder", _without_graphs):
            same = answered(place, runner.conversation(), ids)
        with patch.object(GraphDecoder, "step", lambda *_, **__: None):
            plain = answered(place, runner.conversation(), ids)
        return {
            "graph's tokens": said.metrics.graph_steps,
            **times(said),
            "without, ms": plain.between_ms,
            "equal": said.tokens == same.tokens,
            "as plain steps": said.alike(plain),
        }

    for way in PROGRAMS[: 3 if place.rehearsal else None]:
        yield attempted({"tokens": place.short, **way}, partial(compared, way))


def _without_graphs(model: LoadedModel, sampler: Sampler) -> GraphDecoder:
    """The same launches, each by itself."""
    return GraphDecoder(model, sampler, lambda program: program.run)


def proposals(place: Place) -> Iterator[Row]:
    """What do passes of 8 tokens take, all of them right, by a graph and without?"""
    model = place.large_model()

    def measured(way: dict[str, Any], *, by_graphs: bool) -> Row:
        ids = place.tokens(place.short)
        single = answered(place, place.runner(model, **way).conversation(), ids)
        talk = place.runner(model, speculate="auto", **way).conversation()
        every = [*ids, *single.tokens]
        with (
            patch.object(
                PromptLookup, "proposed", lambda self, n: every[len(self.token_ids) :][:n]
            ),
            patch.object(PromptLookup, "chances", lambda _, n: [1.0] * n),
            patch.object(Pace, "factor", 0.0),
            nullcontext()
            if by_graphs
            else patch.object(speculate, "graph_decoder", lambda _: None),
        ):
            said = answered(place, talk, ids)
        rate = said.metrics.decode_tokens_per_s
        return {
            "passes": said.metrics.decode_steps,
            "accepted": said.metrics.accepted_tokens,
            "a token, ms": 1e3 / rate if rate else None,
            "single tokens, ms": single.between_ms,
            "as single tokens": said.alike(single),
        }

    for way in WAYS[: 1 if place.rehearsal else 4]:
        for by_graphs in (True, False):
            yield attempted(
                {"by a graph": by_graphs, **way}, partial(measured, way, by_graphs=by_graphs)
            )


def together(place: Place) -> Iterator[Row]:
    """How many tokens a second do several answers make together, beside one by itself?"""
    model = place.large_model()

    def measured(rows: int, way: dict[str, Any]) -> Row:
        runner, steps = place.runner(model, max_new_tokens=place.answer, **way), StepsTogether()
        going = []
        for seed in range(rows):
            talk = runner.conversation()
            ids = place.tokens(place.short // 4, seed)
            turn = talk.context.next_turn(ids, talk.config)
            talk.context.read(turn, Callbacks())
            going.append((turn, talk.context.answer(turn, None, in_words=False, ignore_eos=True)))
        took = list[float]()
        for _ in range(place.answer):
            began = perf_counter()
            if took:  # each has a token that has not gone through
                steps.take([turn for turn, _ in going])
            for _, pieces in going:
                next(pieces)
            took.append(perf_counter() - began)
        graphs, between = going[0][0].graphs, median(took[1:])
        return {
            "ms": 1e3 * between,
            "tokens/s": rows / between,
            "recording, ms": 1e3 * (max(took[1:]) - between),
            "graph's steps": graphs and graphs.steps,
            "no graph": graphs and graphs.reason,
        }

    for way in WAYS[: 1 if place.rehearsal else None]:
        for rows in (1, 4, 8):
            yield attempted({"answers": rows, **way}, partial(measured, rows, way))


def requests(place: Place) -> Iterator[Row]:
    """How many tokens a second do requests to a server make together, beside one at a time?"""
    model = place.large_model()

    def measured(count: int, way: dict[str, Any]) -> Row:
        length = place.answer + 2 * count  # the first goes on while the last is read
        runner = place.runner(model, max_new_tokens=length, **way)
        asked: Any = [(place.tokens(place.short, seed), {}) for seed in range(count)]
        with TemporaryDirectory() as folder, patch.object(run_stats, "SLICE_S", 1e9):
            said = served(runner, Path(folder), asked)
            with patch.object(answering, "MOST", 1):
                alone = served(runner, Path(folder), asked)
        begun, end = (at(each.came[end] for each in said) for at, end in ((max, 0), (min, -1)))
        between = sum(begun < came <= end for each in said for came in each.came)
        by_itself = sum(each.came[-1] - each.came[0] for each in alone)
        rate, other = between / (end - begun), count * (length - 1) / by_itself
        own, others = ([each.tokens for each in every] for every in (said, alone))
        pairs = zip(chain(*own), chain(*others), strict=False)
        return {
            "tokens/s": rate,
            "one at a time, tokens/s": other,
            "times as many": rate / other,
            "equal": own == others,
            "tokens alike": sum(one == two for one, two in pairs),
        }

    for way in WAYS[1:3]:
        for count in (4, 8):
            yield attempted({"requests": count, **way}, partial(measured, count, way))


def kernels(place: Place) -> Iterator[Row]:
    """Which kernels take the time of a token and of reading, and how much of it is the device's?"""
    model = place.large_model()
    for way in WAYS[: 1 if place.rehearsal else None]:
        try:
            yield from profiled_reading(place, model, way)
            yield from profiled_steps(place, model, way)
        except Exception as error:
            yield {**way, "failed": told(error)}


def profiled_reading(place: Place, model: LoadedModel, way: dict[str, Any]) -> Iterator[Row]:
    """Kernels of reading, the second time."""
    for _ in range(2):
        talk = place.runner(model, **way).conversation()
        profile, seconds = profiled(lambda talk=talk: talk.read(place.tokens(place.short)))
    yield from kernel_rows({"of": f"{place.short:,} tokens read", **way}, profile, seconds, 1)


def profiled_steps(place: Place, model: LoadedModel, way: dict[str, Any]) -> Iterator[Row]:
    """Kernels of a step, once the answer is under way."""
    talk = place.runner(model, **way, max_new_tokens=place.answer).conversation()
    pieces = talk.stream_tokens(place.tokens(place.short), ignore_eos=True)
    counted = [next(pieces) for _ in range(place.answer // 4)]
    steps = place.answer // 2

    def go_on() -> None:
        counted.extend(next(pieces) for _ in range(steps))

    profile, seconds = profiled(go_on)
    pieces.close()
    yield from kernel_rows({"of": "a token", **way}, profile, seconds, steps)


def beside_transformers(place: Place) -> Iterator[Row]:
    """How long does transformers take for the same, with the same weights?"""
    model = place.large_model()
    module = model.module
    for length in (place.short, place.long):
        ids = torch.tensor([place.tokens(length)], device=place.device)
        runner = place.runner(model, method="full", recall="off")
        for _ in range(2):  # the first warms up
            said = answered(place, runner.conversation(), ids[0].tolist())
        yield {"tokens": length, "program": "kvlite, full", **times(said)}
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


def transformers_times(module: Any, ids: Tensor, place: Place) -> tuple[float, float]:
    """Seconds that transformers takes to read, and for a token."""
    seconds = []
    for count in (1, 1, place.answer):  # the first warms up
        begun = perf_counter()
        module.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
        synchronize(place)
        seconds.append(perf_counter() - begun)
    return seconds[1], (seconds[2] - seconds[1]) / (place.answer - 1)


def choosing(place: Place) -> Iterator[Row]:
    """What does choosing on the host save, and what does it take?"""
    model = place.large_model()

    def measured(scores: str) -> Row:
        runner = place.runner(model, method="snapkv", recall="off", scores=scores)
        metrics = runner.generate(place.tokens(place.long), 4, ignore_eos=True).metrics
        row = {"reading, s": metrics.time_to_first_token_s, "peak, GiB": metrics.peak_bytes / 2**30}
        return {**row, "choosing, s": metrics.score_s}

    for scores in ("device", "host", "host-softmax"):
        yield attempted({"tokens": place.long, "scores": scores}, partial(measured, scores))
