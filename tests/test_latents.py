"""Attention over latents: what is kept of a token, once, and what makes it impossible."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVBits, KVSize, LayerCache, parse_kv_bits
from kvlite.cache.segment import bytes_held
from kvlite.conversation.conversation import Conversation
from kvlite.engine.prefill import prefill
from kvlite.engine.quantized_attention import compiled, compiles, in_parts
from kvlite.errors import ModelError
from kvlite.methods import METHODS
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.attention_interface import ATTENTION
from kvlite.model.latents import keep_latents
from kvlite.ops.softmax import Softmax
from tests.conftest import Tiny, make_tiny
from tests.test_snapshot import FIRST, SECOND, answered, chat, follows, same

# One head is no groups of heads.
NAMES = [name for name in METHODS if name != "uncomp"]


@pytest.fixture(scope="module")
def glm() -> Tiny:
    return make_tiny("glm4-moe-lite")


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe-lite"])
def test_a_token_is_kept_as_transformers_keeps_it(name: str) -> None:
    """As one head for all, the rotated part before the latent vector, key and value at once."""
    tiny, ids = make_tiny(name), torch.arange(3, 43)[None]
    cache = tiny.model.empty_cache()
    prefill(tiny.model, cache, ids, layer_policies(Full(), tiny.model.shape, 99, 40), chunk=16)
    with torch.no_grad():
        past = tiny.reference(ids, use_cache=True).past_key_values
    for ours, theirs in zip(cache.layers, past.layers, strict=True):
        (head_group,) = ours.head_groups
        assert head_group.heads == (0,) and ours.values is ours.keys
        kept = torch.cat([theirs.values, theirs.keys], -1)
        torch.testing.assert_close(head_group.keys[:, :, :40], kept, rtol=1e-4, atol=1e-5)
        assert ours.nbytes == head_group.capacity * ((40 + 8) * 4 + 4)


@pytest.mark.cases(2, 8)
@pytest.mark.parametrize("method", NAMES)
def test_every_method_answers_as_if_keys_and_values_lay_apart(glm: Tiny, method: str) -> None:
    """To the last bit, in two turns; with recall, where the method has it. Values take nothing."""
    apart = copy(glm.model)
    sizes = tuple(replace(each, latent=False) for each in glm.model.shape.kv_sizes)
    apart.shape, apart.meta = replace(glm.model.shape, kv_sizes=sizes), None
    given: dict[str, Any] = {"method": method, "recall": "auto"}
    once, twice = chat(glm.model, **given), chat(apart, **given)
    for ids in (FIRST, SECOND):
        assert same(answered(once, ids), answered(twice, ids))
    assert once.cache.nbytes == bytes_held(without_values(twice.cache.layers))
    if once.store is not None and twice.store is not None:
        stored = [layer.cache for layer in twice.store.layers]
        entries = once.store.nbytes - once.store.cached_score_bytes
        assert entries == bytes_held(without_values(stored))


def without_values(layers: list[LayerCache]) -> Iterator[Tensor]:
    for layer in layers:
        segments = [each.segment for each in layer.head_groups if each.segment is not None]
        values = [layer.values, *(each for own in segments for each in own.values.tensors)]
        yield from (each for each in layer.tensors if not any(each is own for own in values))


@pytest.mark.cases(2, 5)
@pytest.mark.parametrize(
    ("method", "bits", "near"),
    [
        ("full", "kivi4", 0.2),
        ("full", "4", 0.2),
        ("kvx", "16", 0.02),
        ("kvx", "k8v4", 0.02),
        ("snapkv", "4", 0.2),
        ("h2o", "8", 0.02),
        ("minicache:start=0", "8", 9.0),
    ],
)
def test_what_is_saved_goes_on(
    glm: Tiny, method: str, bits: str, near: float, tmp_path: Path
) -> None:
    """And what was rounded, brought back or overwritten still is the token's own latents: those of
    the first layer depend on the token alone. (Merged layers have another's directions.)"""
    given = {"method": method, "kv_bits": bits, "recall": "auto", "recall_bits": "8"}
    talk = follows(glm.model, tmp_path / "talk.kv", **given)
    require_own_latents(glm, talk, talk.cache.layers[0], near)
    if talk.store is not None:
        require_own_latents(glm, talk, talk.store.layers[0].cache, 0.02)


def require_own_latents(tiny: Tiny, talk: Conversation, layer: LayerCache, near: float) -> None:
    ids = torch.tensor([talk.token_ids[: talk.cache.seen]])
    with torch.no_grad():
        past = tiny.reference(ids, use_cache=True).past_key_values.layers[0]
    wanted = torch.cat([past.values, past.keys], -1)
    (head_group,) = layer.head_groups
    held = slice(0, head_group.used)
    places = head_group.positions[0, 0, held].long()
    for each in (head_group.keys, head_group.values):
        off = each[0, 0, held] - wanted[0, 0, places]
        assert off.norm() < near * wanted[0, 0, places].norm()


@pytest.mark.parametrize("bits", ["8", "4", "k8v4", "kivi4"])
def test_quantized_latents_are_attended_to_as_they_are_restored(bits: str) -> None:
    """Whether by compiled loops or in parts; they take the bytes of one side."""
    torch.manual_seed(0)
    asked, count, dim = parse_kv_bits(bits), 200, 48
    assert isinstance(asked, KVBits)
    exact = LayerCache(
        [((0,), count)],
        batch=1,
        dim=dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
        latent=True,
    )
    latents = torch.randn(1, 1, count, dim) + 1
    exact.head_groups[0].append(latents, latents, torch.arange(count, dtype=torch.int32))
    layer = exact.resized([count], bits=asked)
    (head_group,), packed = layer.head_groups, asked.packed(count)
    line = packed * asked.entry_bytes(KVSize(1, dim, latent=True)) + (count - packed) * (
        4 * dim + 4
    )
    assert layer.nbytes == line + 4 * dim  # and what keys would be centered by
    queries = torch.randn(1, 1, 6, dim)
    restored = head_group.keys
    assert restored.equal(head_group.values)
    expected = (queries @ restored.mT).softmax(-1) @ restored
    ways = [in_parts, compiled] if compiles(head_group) else [in_parts]
    assert len(ways) == (1 if asked.form == "kivi" else 2)
    for attend in ways:
        out, _ = attend(queries, head_group, Softmax(1.0), remembers=False)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_quantized_projections_of_latents_are_refused() -> None:
    attention = make_tiny("deepseek-v3").model.module.model.layers[0].self_attn
    keep_latents(attention, ATTENTION)
    codes = torch.zeros(99, 1, dtype=torch.uint8)
    attention.kv_b_proj.weight = torch.nn.Parameter(codes, requires_grad=False)
    with pytest.raises(ModelError, match="kv_b_proj, which is multiplied into others, is quantiz"):
        keep_latents(attention, ATTENTION)
