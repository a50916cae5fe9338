"""Does the device say what it should? Tiny models, several processes at once."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from time import perf_counter

import torch

from kvlite.errors import KvliteError
from kvlite.methods import METHODS
from tests.conftest import ARCHITECTURES, make_tiny
from tests.gpu.measure import Row, attempted, told
from tests.gpu.models import Place

WORKERS = 4
# Tests that run on whatever device there is.
SUITES = (
    "tests/test_triton_layer_ops.py",
    "tests/test_triton_linear.py",
    "tests/test_triton_experts.py",
    "tests/test_triton_attention.py",
    "tests/test_triton_ragged.py",
    "tests/test_triton_sums.py",
    "tests/test_triton_search.py",
    "tests/test_triton_recall.py",
    "tests/test_pinned.py",
    "tests/test_kv_transfer.py",
    "tests/test_host_scores.py",
)


def equality(place: Place) -> Iterator[Row]:
    """Does `full` give transformers' tokens on the device, on every architecture?"""
    names = sorted(ARCHITECTURES)[: 3 if place.rehearsal else None]
    yield from side_by_side(place, equal_to_transformers, names)


def equal_to_transformers(place: Place, name: str) -> list[Row]:
    """Whether `full` gives transformers' tokens."""
    row = {"architecture": name}
    return [attempted(row, partial(_equal_to_transformers, place, name))]


def _equal_to_transformers(place: Place, name: str) -> Row:
    ids = list(range(3, 83))
    tiny = make_tiny(name, place.device.type)
    runner = place.runner(tiny.model, method="full", recall="off")
    answer = runner.generate(ids, max_new_tokens=32, ignore_eos=True)
    prompt = torch.tensor([ids], device=place.device)
    with torch.no_grad():
        theirs = tiny.reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
        )
    equal = answer.token_ids == theirs[0, len(ids) :].tolist()
    return {"equal": equal, "no graph": answer.metrics.no_graph}


def methods(place: Place) -> Iterator[Row]:
    """Does every method say on the device what it says on a CPU, with every kind of cache?"""
    yield from side_by_side(place, equal_to_cpu, list(METHODS)[: 2 if place.rehearsal else None])


def equal_to_cpu(place: Place, name: str) -> list[Row]:
    """Whether a method says what it says on a CPU."""
    rows = list[Row]()
    models = [make_tiny("llama", kind).model for kind in (place.device.type, "cpu")]
    ids = list(range(3, 123))
    for bits in ("16", "8", "4"):
        for recall in ("off", "ram"):
            given = {"method": name, "kv_bits": bits, "recall": recall, "budget": "48"}
            row = {"method": name, "bits": bits, "recall": recall}
            try:
                answers = [
                    place.runner(model, **given).generate(ids, 24, ignore_eos=True)
                    for model in models
                ]
            except KvliteError as error:
                rows.append({**row, "equal": None, "refused": str(error)})
                continue
            except Exception as error:
                rows.append({**row, "equal": False, "failed": told(error)})
                continue
            said = [answer.token_ids for answer in answers]
            alike = sum(own == other for own, other in zip(*said, strict=True))
            row["equal"], row["alike of 24"] = said[0] == said[1], alike
            rows.append({**row, "no graph": answers[0].metrics.no_graph})
    return rows


def suites(place: Place) -> Iterator[Row]:
    """Do the tests of kernels, copies and choices pass on the device?"""
    with ThreadPoolExecutor(WORKERS) as workers:
        files = SUITES[: 1 if place.rehearsal else None]
        yield from workers.map(partial(tested, place), files)


def tested(place: Place, file: str) -> Row:
    """A file's tests, run."""
    collect = ["--collect-only"] if place.rehearsal else []
    options = ["-v", "-p", "no:cacheprovider", "-m", "long or not long", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, *collect, file]
    begun = perf_counter()
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"(\d+) (passed|failed|error)", ran.stdout)
    counted = {word: int(count) for count, word in found}
    if ran.returncode:
        sys.stderr.write(ran.stdout[-20_000:] + ran.stderr[-2_000:])
    return {
        "tests": file,
        "passed": counted.get("passed", 0),
        "failed": counted.get("failed", 0) + counted.get("error", 0),
        "exit code": ran.returncode,
        "s": perf_counter() - begun,
    }


def side_by_side(
    place: Place, check: Callable[[Place, str], list[Row]], names: Sequence[str]
) -> Iterator[Row]:
    """Rows of each name, in processes of their own."""
    if place.rehearsal:
        for name in names:
            yield from check(place, name)
        return
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for rows in pool.map(partial(check, place), names):
            yield from rows
