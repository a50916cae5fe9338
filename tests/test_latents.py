"""Attention over latents: what is kept of a token, and what makes it impossible."""

import pytest
import torch

from kvlite.engine.prefill import prefill
from kvlite.errors import ModelError
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.attention_interface import ATTENTION
from kvlite.model.latents import keep_latents
from tests.conftest import make_tiny


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe-lite"])
def test_a_token_is_kept_as_transformers_keeps_it(name: str) -> None:
    """As one head for all, the rotated part before the latent vector."""
    tiny, ids = make_tiny(name), torch.arange(3, 43)[None]
    cache = tiny.model.empty_cache()
    prefill(tiny.model, cache, ids, layer_policies(Full(), tiny.model.shape, 99, 40), chunk=16)
    with torch.no_grad():
        past = tiny.reference(ids, use_cache=True).past_key_values
    for ours, theirs in zip(cache.layers, past.layers, strict=True):
        (head_group,) = ours.head_groups
        assert head_group.heads == (0,)
        for held in (head_group.keys, head_group.values):
            kept = torch.cat([theirs.values, theirs.keys], -1)
            torch.testing.assert_close(held[:, :, :40], kept, rtol=1e-4, atol=1e-5)


def test_quantized_projections_of_latents_are_refused() -> None:
    attention = make_tiny("deepseek-v3").model.module.model.layers[0].self_attn
    keep_latents(attention, ATTENTION)
    codes = torch.zeros(99, 1, dtype=torch.uint8)
    attention.kv_b_proj.weight = torch.nn.Parameter(codes, requires_grad=False)
    with pytest.raises(ModelError, match="kv_b_proj, which is multiplied into others, is quantiz"):
        keep_latents(attention, ATTENTION)
