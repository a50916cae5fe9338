"""Recall in a decode step that is one program, on a device that a CPU stands in for: replays of a
CUDA graph's double take the plain step's tokens."""

import pytest
import torch

from kvlite.engine.cuda_graph import Replay
from kvlite.engine.step_program import StepProgram
from tests import graph_double
from tests.conftest import Tiny, make_tiny
from tests.cuda import guard
from tests.test_step_program import GROWS, compare

if not guard.POSSIBLE:
    pytest.skip("needs a torch without CUDA, triton and g++", allow_module_level=True)

from tests.cuda.fake_cuda import fake_cuda


def unpadded() -> Tiny:
    """A tiny Llama without a query of nothing, the padding's, which wants all entries alike."""
    tiny = make_tiny("llama", "cuda")
    with torch.no_grad():
        tiny.model.module.model.embed_tokens.weight[0] = 0.02
    return tiny


# Entries count in the index sixteen at a time, and are quantized 32 at a time, within a recording.
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("method", "bits", "entries", "steps"),
    [
        ("snapkv:per_head=true", "16", 8, 18),
        ("spans", "16", 0, 18),
        ("h2o", "16", 10, 18),
        ("uncomp", "16", 8, 18),
        ("spans", "4", 10, 36),
        ("h2o", "k8v2", 10, 18),
        ("spans", "k8v4", 10, 70),
    ],
)
def test_replays_are_plain_steps(method: str, bits: str, entries: int, steps: int) -> None:
    recorded = []

    def counting(program: StepProgram) -> Replay:
        recorded.append(1)
        return graph_double.capture(program)

    with fake_cuda():
        given = {"budget": 60, "recall": entries, "bits": bits}
        graphs = compare(unpadded(), method, steps, capture=counting, **given)
        assert graphs.steps >= steps - GROWS - 1
        assert (len(recorded), graphs.reason) == (1, "")


@pytest.mark.parametrize(
    ("entries", "reason"),
    [(20, "little was read"), (40, "the cache has fewer entries than a token may want")],
)
def test_what_needs_the_host_is_left_to_plain_steps(entries: int, reason: str) -> None:
    with fake_cuda():
        graphs = compare(unpadded(), "spans", steps=2, recall=entries)
        assert (graphs.steps, graphs.reason) == (0, reason)
