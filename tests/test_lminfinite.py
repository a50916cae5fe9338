"""LM-Infinite against dense attention under its mask, pair by pair, while reading and answering."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.prefill import Prefill
from kvlite.engine.slices import in_one_go
from kvlite.engine.sparse_attention import PositionClamp, SparseAttentionMask
from kvlite.errors import SettingError
from kvlite.memory.meter import TensorMeter
from kvlite.methods import parse_method
from kvlite.methods.capabilities import LambdaMask
from kvlite.methods.layer_policy import layer_policies
from kvlite.methods.lminfinite import LMInfinite
from kvlite.model.rotary import Rotation, rotated
from kvlite.ops.attention import attend_band, attend_masked
from kvlite.ops.softmax import Softmax

from .conftest import Tiny, make_tiny
from .oracles.infinite import lambda_attention
from .test_engine import empty, run


class Unrotated(torch.nn.Module):
    """Stands where a model rotates, and leaves queries and keys as they are."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor, *kind: str) -> Rotation:
        cos, sin = self.rotary(x, position_ids, *kind)
        return torch.ones_like(cos), torch.zeros_like(sin)


def lambda_logits(tiny: Tiny, ids: Tensor, sinks: int, window: int, limit: bool) -> Tensor:
    """Logits `(batch, n, vocab)` of a model that knows no positions but through the oracle."""
    shape, n = tiny.model.shape, ids.shape[1]
    table = [(cos[0].numpy(), sin[0].numpy()) for cos, sin in tiny.model.rotations(0, n)]

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **more: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        own = shape.window_sizes[layer]
        sparse_mask = (sinks, window, limit) if own is None else (0, own, False)
        outs = [
            lambda_attention(
                *each,
                range(n),
                *table[layer],
                *sparse_mask,
                scaling,
                more.get("softcap"),
                more.get("s_aux"),
            )
            for each in zip(q.numpy(), k.numpy(), v.numpy(), strict=True)
        ]
        return torch.tensor(np.stack(outs), dtype=q.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("lambda-oracle", attention)
    model = AutoModelForCausalLM.from_config(
        deepcopy(tiny.reference.config), attn_implementation="lambda-oracle"
    )
    model.load_state_dict(tiny.reference.state_dict())
    model.model.rotary_emb = Unrotated(model.model.rotary_emb)
    with torch.no_grad():
        logits: Tensor = model.eval()(ids, use_cache=False).logits
    return logits


def spec(sinks: int, limit: bool) -> str:
    return f"lminfinite:sinks={sinks},limit={str(limit).lower()}"


@pytest.mark.cases(1, 8)
@pytest.mark.parametrize("limit", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-mha",
        "llama-rope-yarn",
        "llama-rope-llama3",
        "llama-rope-dynamic",
        "qwen2-sliding",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi3-partial",
        "gpt-oss",
    ],
)
def test_reading_and_50_steps_equal_dense_attention_under_the_mask(name: str, limit: bool) -> None:
    tiny, prompt = make_tiny(name), torch.randint(3, 199, (1, 60))
    tokens, logits = run(
        tiny.model, empty(tiny.model), prompt, 50, method=spec(4, limit), budget=26, chunk=16
    )
    expected = lambda_logits(tiny, torch.cat([prompt, tokens], 1), 4, 22, limit)
    assert (logits - expected[:, 59:]).abs().max() < 1e-4


@pytest.mark.cases(1)
@pytest.mark.parametrize(("sinks", "budget"), [(0, 20), (3, 4), (3, 5), (10, 30)])
def test_a_batch_of_three(llama: Tiny, sinks: int, budget: int) -> None:
    prompt = torch.randint(3, 199, (3, 70))
    tokens, logits = run(
        llama.model, empty(llama.model, 3), prompt, 12, method=spec(sinks, True), budget=budget
    )
    whole = torch.cat([prompt, tokens], 1)
    expected = lambda_logits(llama, whole, sinks, budget - sinks, True)
    assert (logits - expected[:, 69:]).abs().max() < 1e-4


@pytest.mark.cases(1)
@pytest.mark.parametrize("limit", [True, False])
def test_later_turns_read_on(llama: Tiny, limit: bool) -> None:
    """Two turns are one text, whatever was dropped in between."""
    first, second = torch.randint(3, 199, (1, 45)), torch.randint(3, 199, (1, 50))
    cache, how = empty(llama.model), {"method": spec(4, limit), "budget": 30}
    said, _ = run(llama.model, cache, first, 10, **how)
    later, logits = run(llama.model, cache, second, 10, **how)
    whole = torch.cat([first, said, second, later], 1)
    expected = lambda_logits(llama, whole, 4, 26, limit)
    assert (logits - expected[:, 45 + 10 + 49 :]).abs().max() < 1e-4
    assert cache.entries_mean == 30


@pytest.mark.parametrize("limit", [True, False])
def test_larger_budgets_than_before_see_what_was_left(llama: Tiny, limit: bool) -> None:
    """A layer that an earlier turn cut shorter than the window now reaches: 4 sinks, then a gap."""
    mask = LambdaMask(4, 12, limit)
    line = [0, 1, 2, 3, *range(20, 32)]
    before, tables = len(line) - 12, llama.model.rotations(0, 40)
    cos, sin = tables[0]
    near, far = cos[:, :4], sin[:, :4]
    limits = PositionClamp((near, far), (cos[:, :1], sin[:, :1]), (cos[:, 12:13], sin[:, 12:13]))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 12, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, len(line), 16, generator=generator)
    own = cos[:, 20:32], sin[:, 20:32]
    sparse_mask = SparseAttentionMask(mask, limits if limit else None)
    keys = rotated(k, (cos[:, line], sin[:, line]))
    ours = sparse_mask.attend(rotated(q, own), keys, v, line[before], own, Softmax(0.25))
    expected = lambda_attention(q[0], k[0], v[0], line, cos[0], sin[0], 4, 12, limit, 0.25)
    assert np.allclose(ours[0].numpy(), expected, atol=1e-5)


@torch.inference_mode()
def test_reading_never_holds_more_than_the_budget_and_a_chunk(llama: Tiny) -> None:
    model, shape = llama.model, llama.model.shape
    layer_bytes = shape.kv_heads * shape.kv_size.entry_bytes(4)
    peaks = {}
    for method in ("lminfinite:sinks=4", "streaming"):
        policies = layer_policies(parse_method(method), shape, 24, 960)
        ids = torch.randint(3, 199, (1, 960))
        reading = Prefill(model, empty(model), ids, policies, chunk=8)
        there = [*model.module.parameters(), reading.hidden, *reading.rotations[0]]
        with TensorMeter(there) as meter:
            before = meter.live
            reader = in_one_go(reading.read_layer(0))
            peaks[method] = meter.peak - before
        assert reader.layer.nbytes == (24 + 8 if "inf" in method else 960) * layer_bytes
    assert peaks["streaming"] > 960 * layer_bytes
    assert peaks["lminfinite:sinks=4"] < 0.2 * 960 * layer_bytes


# --- what it cannot do ---------------------------------------------------------------------------


def test_sinks_that_were_dropped_are_asked_for(llama: Tiny) -> None:
    talk = Conversation(llama.model, Settings(method="snapkv:window=4", budget="12"))
    talk.generate(list(range(3, 100)), max_new_tokens=4, ignore_eos=True)
    with pytest.raises(SettingError, match=r"first 10 tokens.*new conversation, or use streaming"):
        talk.generate([5], method="lminfinite", budget="20")
    assert talk.generate([5], max_new_tokens=2, method="streaming", budget="20").token_ids


def test_models_whose_rotations_change_with_the_length_go_without_the_limit() -> None:
    model = make_tiny("phi3-longrope").model
    talk = Conversation(model, Settings(method="lminfinite", budget="20", max_new_tokens=3))
    with pytest.raises(SettingError, match=r"longrope.*lminfinite:limit=false"):
        talk.generate(list(range(3, 60)))
    assert talk.cache.seen == 0
    assert talk.generate(list(range(3, 60)), method="lminfinite:limit=false").token_ids


# --- the band ------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 40),
    before=st.integers(0, 40),
    width=st.integers(1, 60),
    softcap=st.sampled_from([None, 2.0]),
)
def test_a_band_equals_a_mask(rows: int, before: int, width: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(rows + 50 * before)
    n = before + rows
    q = torch.randn(2, 6, rows, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, n, 8, generator=generator)
    i, j = torch.arange(before, n)[:, None], torch.arange(n)
    mask = (j <= i) & (j > i - width)
    out, lse = attend_band(q, k, v, width, Softmax(0.4, softcap))
    expected = attend_masked(q, k, v, mask, Softmax(0.4, softcap))
    assert (out - expected).abs().max() < 1e-5
    logits = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 0.4
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~mask, -torch.inf)
    assert (lse - logits.logsumexp(-1)).abs().max() < 1e-5


def test_one_rule_a_layer_says_what_is_seen() -> None:
    policies = layer_policies(parse_method("lminfinite"), make_tiny("gemma3").model.shape, 50, 400)
    assert [policy.mask for policy in policies] == [None, LambdaMask(10, 40, True)] * 2
    assert LMInfinite(sinks=0).mask(50) == LambdaMask(0, 50, False)
