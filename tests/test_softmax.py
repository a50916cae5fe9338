"""Learned sinks on every path: attention as if each row saw one entry more, which has the sink's
logit and a value of zeros."""

import pytest
import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.engine.layer_prefill import LayerPrefill
from kvlite.engine.quantized_attention import compiled, compiles, in_parts
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.methods.scores import Window, window_rows
from kvlite.ops.attention import (
    attend,
    attend_band,
    attend_causal,
    attend_masked,
    attend_ragged,
    attend_with_rows,
    attention_peaks,
    attention_sums,
)
from kvlite.ops.softmax import Softmax
from tests.test_packed import head_groups

SCALE, GROUP, KV_HEADS, DIM = 0.3, 3, 2, 8
SOFTCAPS = [None, 2.0]
UNUSED = torch.zeros(1, 5, 0), torch.zeros(1, 5, 0)


def case(rows: int, n: int, softcap: float | None) -> tuple[Tensor, Tensor, Tensor, Softmax]:
    generator = torch.Generator().manual_seed(rows + n)
    q = torch.randn(2, KV_HEADS * GROUP, rows, DIM, generator=generator) * 2
    k, v = torch.randn(2, 2, KV_HEADS, n, DIM, generator=generator)
    sinks = torch.randn(KV_HEADS * GROUP, generator=generator) * 2
    return q, k, v, Softmax(SCALE, softcap, sinks)


def naive(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, probabilities `(batch, heads, L, N)` and log-sum-exp, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(group, 1) for each in (k, v))
    logits = q.double() @ k.mT * softmax.scale
    if softmax.softcap is not None:
        logits = softmax.softcap * (logits / softmax.softcap).tanh()
    assert softmax.sinks is not None
    sinks = softmax.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    logits = torch.cat([logits.masked_fill(~mask, -torch.inf), sinks], -1)
    probabilities = logits.softmax(-1)[..., :-1]
    return probabilities @ v, probabilities, logits.logsumexp(-1)


def causal(rows: int, n: int, width: int = 1000) -> Tensor:
    i, j = torch.arange(n - rows, n)[:, None], torch.arange(n)
    return (j <= i) & (j > i - width)


def near(ours: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_sinks_enter_once_all_parts_are_merged(softcap: float | None) -> None:
    q, k, v, softmax = case(7, 19, softcap)
    expected, probabilities, lse = naive(q, k, v, softmax, causal(7, 19))
    ours, our_lse = softmax.with_sinks(*attend_causal(q, k, v, softmax))
    near(ours, expected)
    near(our_lse, lse)
    by_group = probabilities.view(2, KV_HEADS, GROUP, 7, 19)
    near(attention_sums(q, k, our_lse, softmax), by_group.mean(2).sum(2))
    expected, probabilities, lse = naive(q, k, v, softmax, causal(7, 19, 5))
    ours, our_lse = softmax.with_sinks(*attend_band(q, k, v, 5, softmax))
    near(ours, expected)
    near(attend_masked(q, k, v, causal(7, 19, 5), softmax), expected)
    everything = torch.ones(7, 19, dtype=torch.bool)
    expected, probabilities, lse = naive(q, k, v, softmax, everything)
    near(softmax.with_sinks(*attend(q, k, v, softmax, causal=False))[0], expected)
    by_group = probabilities.view(2, KV_HEADS, GROUP, 7, 19)
    near(attention_peaks(q, k, lse.float(), softmax), by_group.flatten(2, 3).amax(2))
    out, rows = attend_with_rows(q, k, v, softmax)
    near(out, expected)
    near(rows, by_group.mean(2))


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_one_token_over_runs_of_slots(softcap: float | None) -> None:
    q, k, v, softmax = case(1, 19, softcap)
    expected, _, _ = naive(q, k, v, softmax, torch.ones(1, 19, dtype=torch.bool))
    flat = [each.flatten(1, 2) for each in (k, v)]
    queries = q.view(2, KV_HEADS, GROUP, DIM)
    starts = torch.tensor([0, 19])
    out = attend_ragged(queries, *flat, starts, starts + 18, 19, softmax)
    near(out.flatten(1, 2)[:, :, None], expected)


def test_heads_in_several_groups_have_their_own_sinks() -> None:
    q, k, v, softmax = case(5, 5, None)
    layer = LayerCache(
        [((1,), 9), ((0,), 9)], batch=2, dim=DIM, dtype=torch.float32, device=torch.device("cpu")
    )
    policy = LayerPolicy(parse_method("full"), 10**6)
    reader = LayerPrefill(layer, policy, torch.arange(5, dtype=torch.int32), 5, UNUSED)
    near(reader.attend(q, k, v, softmax), naive(q, k, v, softmax, causal(5, 5))[0])


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_methods_are_shown_what_the_model_pays(softcap: float | None) -> None:
    q, k, v, softmax = case(5, 12, softcap)
    layer = LayerCache(
        [((1,), 12), ((0,), 12)], batch=2, dim=DIM, dtype=torch.float32, device=torch.device("cpu")
    )
    _, probabilities, _ = naive(q, k, v, softmax, causal(5, 12))
    expected = probabilities.view(2, KV_HEADS, GROUP, 5, 12).mean(2)
    window = Window(q, 7, KV_HEADS, softmax)
    for head_group in layer.head_groups:
        heads = list(head_group.heads)
        head_group.append(k[:, heads], v[:, heads], torch.arange(12))
        near(window_rows(head_group, window), expected[:, heads])


def test_quantized_entries_share_with_the_sinks() -> None:
    """In parts, and by compiled loops where there are any; the kernel is tested beside them."""
    for head_group in head_groups():
        heads = len(head_group.heads)
        queries = torch.randn(1, heads, 4 // heads, 16)
        sinks = torch.randn(4)
        plain, weights = in_parts(queries, head_group, Softmax(1.0, 2.0), True)
        out, shared = in_parts(queries, head_group, Softmax(1.0, 2.0, sinks), True)
        keys = head_group.keys[:, :, : head_group.used]
        logits = 2.0 * (queries @ keys.mT / 2.0).tanh()
        rest = (logits.logsumexp(-1) - sinks.view(1, heads, -1)).sigmoid()[..., None]
        assert weights is not None and shared is not None
        near(shared, weights.double() * rest, atol=1e-4)
        near(out, plain.double() * rest, atol=1e-4)
        if compiles(head_group):
            ours, own = compiled(queries, head_group, Softmax(1.0, 2.0, sinks), True)
            assert own is not None
            near(ours, out.double(), atol=1e-4)
            near(own, shared.double(), atol=1e-4)
