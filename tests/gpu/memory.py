"""Does what needs memory stay within it, and what does it take?"""

import importlib.util
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import kvlite
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.runner import Runner
from kvlite.errors import KvliteError
from tests.gpu.measure import (
    Row,
    allocated,
    answered,
    attempted,
    capped,
    empty,
    figures,
    measured_bandwidth,
    times,
)
from tests.gpu.models import Place, save_random


def long_documents(place: Place) -> Iterator[Row]:
    """Within 24 GB: what do the longest document, a further question and a token take?"""
    with capped(place):
        bandwidth, model = measured_bandwidth(place), place.large_model()
        weights = sum(model.shape.weight_bytes(model.weights).values())
        for recall in ("ram", "off"):
            cap = f"{place.cap >> 30}GiB"
            talk = place.runner(model, method="spans", recall=recall, vram=cap).conversation()

            def asked(count: int, turn: int, talk: Conversation = talk) -> Row:
                said = answered(place, talk, place.tokens(count, turn))
                return figures(said, weights, bandwidth)

            for turn, (name, count) in enumerate(
                (("document", place.longest), ("further question", 32), ("another", 32))
            ):
                row = {"recall": recall, "turn": name, "tokens": count}
                yield attempted(row, partial(asked, count, turn))


def out_of_memory(place: Place) -> Iterator[Row]:
    """Does an answer come when another program takes memory while it is read for, or given?"""
    if place.device.type != "cuda":
        yield {"skipped": "a CPU's memory cannot be taken away"}
        return
    total = torch.cuda.get_device_properties(place.device).total_memory

    def leave(held: int) -> None:
        torch.cuda.set_per_process_memory_fraction(held / total)

    def squeezed(spare: int, after: int) -> Row:
        model = place.large_model()
        talk = place.runner(model, method="full", max_new_tokens=256).conversation()
        said, metrics = 0, None
        try:
            if not after:
                leave(allocated(place) + spare)
            for piece in talk.stream_tokens(place.tokens(place.short), ignore_eos=True):
                said, metrics = said + 1, piece.metrics
                if said == after:
                    leave(torch.cuda.memory_reserved(place.device) + spare)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert metrics is not None
        ended = {"tokens": said, "ended by": metrics.finish_reason}
        return {**ended, "given up": "; ".join(metrics.fallbacks)}

    # Reading takes some 1.2 GiB, a step of an answer nothing.
    for after, spares in ((0, (2048, 1024, 512, 256)), (8, (64, 0))):
        for spare in spares:
            row = {"while": "answering" if after else "reading", "spare, MiB": spare}
            yield attempted(row, partial(squeezed, spare << 20, after))
            empty(place)


def quantized_weights(place: Place) -> Iterator[Row]:
    """Do quantized weights take the bytes stated, and how fast are they?"""
    bandwidth = measured_bandwidth(place)

    def measured(folder: str, name: str) -> Row:
        before, begun = allocated(place), perf_counter()
        runner = loaded(folder, place, weights=name)
        row = {"loading, s": perf_counter() - begun}
        held = allocated(place) - before
        stated = sum(runner.shape.weight_bytes(runner.model.weights).values())
        for _ in range(2):  # the first warms up
            said = answered(place, runner.conversation(), place.tokens(place.short))
        row |= {"MiB stated": stated / 2**20, "MiB allocated": held / 2**20}
        return {**row, **figures(said, stated, bandwidth)}

    with tempfile.TemporaryDirectory() as folder:
        save_random(place.small, Path(folder), place.device)
        for name in ("bf16", "nf4", "int8"):
            if name != "bf16" and importlib.util.find_spec("bitsandbytes") is None:
                yield {"weights": name, "skipped": "bitsandbytes is not installed"}
                continue
            yield attempted({"weights": name}, partial(measured, folder, name))
            empty(place)


def streamed_weights(place: Place) -> Iterator[Row]:
    """How fast do weights come to the device layer by layer?"""

    def measured(folder: str, stream: str) -> Row:
        try:
            runner = loaded(folder, place, stream=stream, weights="bf16")
        except KvliteError as error:
            return {"refused": str(error)}
        said = answered(place, runner.conversation(), place.tokens(place.short))
        passing = runner.model.layers.passing
        rate = {} if passing is None else {"GB/s": passing.bytes_per_s / 1e9}
        return {**times(said), **rate, "says": ",".join(map(str, said.tokens[:8]))}

    with tempfile.TemporaryDirectory() as folder:
        save_random(place.small, Path(folder), place.device)
        for stream in ("off", "ram", "disk"):
            yield attempted({"stream": stream}, partial(measured, folder, stream))


def saved_conversations(place: Place) -> Iterator[Row]:
    """How long do saving and opening take, and does what was opened answer alike?"""
    model = place.large_model()
    for length in (place.short, place.long):
        runner = place.runner(model, method="spans", recall="ram", max_new_tokens=place.answer)
        talk, begun = runner.conversation(), perf_counter()
        talk.generate(place.tokens(length), ignore_eos=True)
        row = {"tokens": length, "reading and answering, s": perf_counter() - begun}

        def measured(talk: Conversation = talk, runner: Runner = runner) -> Row:
            with tempfile.TemporaryDirectory() as folder:
                path, begun = Path(folder) / "talk.kv", perf_counter()
                talk.save(path)
                saving, begun = perf_counter() - begun, perf_counter()
                opened = runner.open(path)
                opening, size = perf_counter() - begun, path.stat().st_size
            question = place.tokens(16, 1)
            said = [each.generate(question, ignore_eos=True).token_ids for each in (talk, opened)]
            row = {"saving, s": saving, "opening, s": opening, "GiB": size / 2**30}
            return {**row, "equal": said[0] == said[1]}

        yield attempted(row, measured)


def loaded(folder: str, place: Place, **settings: Any) -> Runner:
    """A model from a folder, on the device."""
    given = {"budget": str(place.budget), "temperature": 0.0, "recall": "off", **settings}
    return kvlite.load(folder, device=place.device.type, **given)
