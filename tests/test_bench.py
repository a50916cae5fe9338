"""The bench: reading once for many methods is the same as reading for each."""

import pytest
import torch

from kvlite.bench.fork import Choice, read_turns
from kvlite.engine.prefill import prefill
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies

from .conftest import Tiny

CHOICES = [
    ("full", 300),
    ("streaming", 40),
    ("random", 40),
    ("snapkv", 40),
    ("snapkv", 500),
    ("pyramidkv", 40),
    ("kvx:beta=4", 40),
    ("kvx:middle=example,omega=8", 40),
    ("kvx:alpha=16,queries=max,heads=max,pool=31", 80),
    ("h2o", 40),
    ("tova:per_head=true", 40),
    ("keydiff", 40),
    ("snapkv:layers=global", 60),
    ("uncomp", 40),
    ("simlayerkv:threshold=0.5,recent=30+kvx:layers=entropy", 60),
    ("minicache:start=0", 60),
]


@pytest.mark.cases(1, 5)
def test_reading_once_gives_every_method_the_cache_it_would_have_alone(kind: Tiny) -> None:
    model = kind.model
    ids = torch.randint(3, 199, (1, 300), generator=torch.Generator().manual_seed(5))
    shape = model.shape
    narrowing = [("pyramidinfer:least=8", 40), ("uncomp:stage=true,least=80", 40)]
    alone = [("lminfinite:sinks=4,limit=false", 40)]
    specs = CHOICES + (alone if any(shape.windows) or shape.recurrent_layers else alone + narrowing)
    if shape.kv_heads == 1:  # one head is no groups of heads
        specs = [each for each in specs if "uncomp" not in each[0]]
    choices = [
        Choice(parse_method(spec).fitted(shape, model.calibration), budget)
        for spec, budget in specs
    ]
    branches = read_turns(model, [ids[0].tolist()], choices, reserve=8)
    for branch in branches:
        method, budget, forked = branch.choice.method, branch.choice.budget, branch.cache
        alone = model.empty_cache()
        policies = layer_policies(method, shape, budget, 300)
        expected = prefill(model, alone, ids, policies, reserve=8)
        torch.testing.assert_close(branch.logits[None], expected)
        for ours, theirs in zip(forked.layers, alone.layers, strict=True):
            for head_group, other in zip(ours.head_groups, theirs.head_groups, strict=True):
                assert head_group.used == other.used
                held = slice(0, head_group.used)
                assert head_group.positions[:, :, held].equal(other.positions[:, :, held])
                torch.testing.assert_close(head_group.keys[:, :, held], other.keys[:, :, held])
                torch.testing.assert_close(head_group.values[:, :, held], other.values[:, :, held])
                assert (head_group.rows is None) == (other.rows is None)
                if head_group.rows is not None and other.rows is not None:
                    torch.testing.assert_close(head_group.rows[..., held], other.rows[..., held])
