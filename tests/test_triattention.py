"""TriAttention against its formula in complex numbers, from vectors that no one has rotated."""

import numpy as np
import pytest
import torch

from kvlite.methods import parse_method

from .conftest import make_tiny
from .oracles.trigonometric import trigonometric_scores
from .test_expectedattention import read
from .test_methods import kept_positions
from .test_rotary import caught

COUNT, BUDGET = 60, 20


@pytest.mark.cases(5)
@pytest.mark.parametrize("options", ["", ":future=5,heads=mean"])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-rope-yarn", "phi3-partial", "llama-mha", "qwen3", "gemma3"),
        *("phi3-longrope", "llama-rope-dynamic", "deepseek-v3", "smollm3"),
    ],
)
def test_scores_are_the_oracles_and_the_best_stay(name: str, options: str) -> None:
    tiny, spec = make_tiny(name), f"triattention{options}"
    torch.manual_seed(0)
    method, ids = parse_method(spec), torch.randint(3, 199, (2, COUNT))
    layer, hidden, reader, reading = read(tiny, ids, spec)
    view = reader.view(layer)
    (head_group,) = view.head_groups
    scores = method.score(head_group, view.window)  # type: ignore[attr-defined]
    rotation = reading.rotations[layer]
    still = torch.ones_like(rotation[0]), torch.zeros_like(rotation[1])
    queries, keys = caught(tiny.model, layer, hidden, still)
    cos, sin = (each[0, 1].double() for each in rotation)  # of position 1
    pairs = len(cos) // 2
    frequencies = torch.atan2(sin, cos)[:pairs].tolist()
    ahead = [1, 2, 4] if options else [1 << power for power in range(17)]
    context = tiny.model.shape.max_context
    coming = [COUNT + each for each in ahead if COUNT + each < context]
    for sequence in range(2):
        lines = head_group.positions[sequence, :, :COUNT].tolist()
        expected = trigonometric_scores(
            queries[sequence],
            keys[sequence],
            lines,
            frequencies,
            float(torch.hypot(cos[0], sin[0])),
            coming,
            "mean" if options else "max",
        )
        assert np.allclose(scores[sequence].numpy(), expected, rtol=1e-3, atol=1e-3)
        for head, line in enumerate(kept_positions(method.select(view))[sequence]):
            best = np.argsort(-expected[head, :-1], kind="stable")[: BUDGET - 1]
            assert line == [*sorted(best), COUNT - 1]
