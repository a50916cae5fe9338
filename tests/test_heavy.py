"""H2O and TOVA against every weight of a dense, masked run; KeyDiff against loops."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVCache
from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.methods import parse_method
from kvlite.methods.keydiff import KeyDiff
from kvlite.methods.layer_policy import layer_policies
from kvlite.ops.attention import attend, attention_sums, merged
from kvlite.ops.softmax import Softmax
from tests.conftest import Tiny, make_tiny
from tests.masked import masked_run
from tests.oracles import selection
from tests.oracles.attention import FloatArray
from tests.test_engine import empty, positions
from tests.test_methods import at, make_case, selected

PROMPT, STEPS, BUDGET = 60, 20, 24
Lines = list[list[list[int]]]  # layer, KV head: positions held, ascending
Expected = Callable[[FloatArray, list[list[int]], int], list[list[int]]]


def lines(cache: KVCache) -> Lines:
    return [[sorted(head) for head in layer] for layer in positions(cache)]


def answered(tiny: Tiny, spec: str, chunk: int) -> tuple[list[Lines], list[Tensor]]:
    """What was held after the prompt and after each step, and the dense run's attention."""
    torch.manual_seed(6)
    prompt = torch.randint(3, 199, (1, PROMPT))
    cache = empty(tiny.model)
    policies = layer_policies(parse_method(spec), tiny.model.shape, BUDGET, PROMPT)
    logits = prefill(tiny.model, cache, prompt, policies, reserve=STEPS, chunk=chunk)
    ids, history = [prompt], [lines(cache)]
    for _ in range(STEPS):
        ids.append(logits.argmax(-1)[None])
        logits = decode_step(tiny.model, cache, ids[-1][0], policies)
        history.append(lines(cache))
    held = [[[{*line} for line in layer] for layer in step] for step in history[1:]]
    return history, masked_run(tiny.reference, torch.cat(ids, 1), held, PROMPT)[1]


def assert_kept_as(history: list[Lines], weighed: list[Tensor], expected: Expected) -> None:
    for layer, weights in enumerate(weighed):
        rows = weights.double().numpy()
        everything = [list(range(PROMPT)) for _ in history[0][layer]]
        assert history[0][layer] == expected(rows[:, :PROMPT], everything, PROMPT)
        for step in range(STEPS):
            # Evicted by what was attended to before the newcomer came.
            seen = PROMPT + step
            held = [[*line, seen] for line in history[step][layer]]
            assert history[step + 1][layer] == expected(rows[:, :seen], held, seen + 1), step


@pytest.mark.cases(6)
@pytest.mark.parametrize("chunk", [16, 100])
@pytest.mark.parametrize(
    ("spec", "recent", "norm"),
    [("h2o", 12, "sum"), ("h2o:norm=mean", 12, "mean"), ("h2o:recent=5", 5, "sum")],
)
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_h2o_keeps_what_all_queries_weigh_most(
    name: str, spec: str, recent: int, norm: str, chunk: int
) -> None:
    tiny = make_tiny(name)

    def expected(rows: FloatArray, held: list[list[int]], seen: int) -> list[list[int]]:
        group = len(rows) // len(held)
        return [
            selection.h2o(rows[h * group : (h + 1) * group], line, BUDGET, recent, seen, norm)
            for h, line in enumerate(held)
        ]

    history, weighed = answered(tiny, spec, chunk)
    assert len(history[0][0]) == tiny.model.shape.kv_heads
    assert_kept_as(history, weighed, expected)


def test_tova_keeps_what_the_newest_token_looks_at(llama: Tiny) -> None:
    def expected(rows: FloatArray, held: list[list[int]], seen: int) -> list[list[int]]:
        last = rows[:, -1, : rows.shape[1]]
        if seen == rows.shape[1]:
            return [selection.tova(last, held[0], BUDGET)] * len(held)
        # The newcomer, which has not looked yet, and the best of those before it.
        return [[*selection.tova(last, held[0][:-1], BUDGET - 1), seen - 1]] * len(held)

    assert_kept_as(*answered(llama, "tova", 16), expected)


@pytest.mark.parametrize("budget", [2, 9, 30])
@pytest.mark.parametrize("compressed", [False, True])
def test_keydiff_keeps_keys_unlike_the_others(budget: int, compressed: bool) -> None:
    case = make_case(kv_heads=3, batch=2, compressed=compressed, seed=9)
    slots = [
        [selection.keydiff(case.sequence(b)[1][head], budget) for head in range(3)]
        for b in range(2)
    ]
    assert selected(KeyDiff(), case, budget) == at(case, slots)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("elements", [1, 700, 1 << 22])
def test_attention_sums_in_blocks(
    softcap: float | None, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.ops.attention.ELEMENTS_AT_ONCE", elements)
    torch.manual_seed(2)
    q, (k, v) = torch.randn(2, 6, 13, 8), torch.randn(2, 2, 3, 40, 8)
    given = Softmax(0.7, softcap)
    own = attend(q, k[:, :, 27:], v[:, :, 27:], given, causal=True)
    earlier = attend(q, k[:, :, :27], v[:, :, :27], given, causal=False)
    sums = attention_sums(q, k, torch.logaddexp(own[1], earlier[1]), given)
    logits = q @ k.repeat_interleave(2, 1).mT * 0.7
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ahead = torch.ones(13, 40, dtype=torch.bool).triu(28)
    weights = logits.masked_fill(ahead, -torch.inf).softmax(-1)
    assert torch.allclose(merged(earlier, own)[0], weights @ v.repeat_interleave(2, 1), atol=1e-5)
    assert torch.allclose(sums, weights.view(2, 3, 2, 13, 40).mean(2).sum(2), atol=1e-5)
