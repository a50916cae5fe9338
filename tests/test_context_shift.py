"""Conversations that outgrow the context a model was trained for."""

from typing import Any

import pytest
import torch

from kvlite.cache import KVCache
from kvlite.engine.prefill import prefill
from kvlite.engine.shift import compacted
from kvlite.errors import ContextError, SettingError
from kvlite.methods.base import Method
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.rotary import unturnable
from tests.conftest import Tiny, make_tiny
from tests.contract.talks import SMALL, heard, opened, said


def read(tiny: Tiny, count: int, method: Method | None = None) -> tuple[KVCache, torch.Tensor]:
    cache = tiny.model.empty_cache()
    torch.manual_seed(3)
    ids = torch.randint(3, 199, (1, count))
    policies = layer_policies(method or Full(), tiny.model.shape, 10**6, count, None, count, None)
    return cache, prefill(tiny.model, cache, ids, policies)


@torch.inference_mode()
def without_first(cache: KVCache, count: int) -> KVCache:
    """A cache that never held the first entries, at the positions that the others have."""
    for layer in cache.layers:
        for head_group in layer.head_groups:
            left = head_group.used - count
            for each in (
                head_group.residual_keys,
                head_group.residual_values,
                head_group.residual_positions,
            ):
                each[:, :, :left] = each[:, :, count : head_group.used].clone()
            head_group.used = left
    return cache


@pytest.mark.cases(5, 24)
def test_what_follows_depends_on_distances_alone(tiny: Tiny) -> None:
    """All entries moved by as much: the next tokens are what they would have been."""
    if any(window is not None for window in tiny.model.shape.windows):
        pytest.skip("a window drops the first entries by itself")
    if unturnable(tiny.model):
        pytest.skip("refused")
    moved, _ = read(tiny, 90)
    still, _ = read(tiny, 90)
    for cache in (moved, still):
        without_first(cache, 40)
    made = compacted(tiny.model, moved, 10**6)
    assert made.seen == 50 and all(layer.entries_mean == 50 for layer in made.layers)
    (head_group,) = made.layers[0].head_groups
    assert head_group.residual_positions[0, 0].tolist() == [*range(50)]
    policies = layer_policies(Full(), tiny.model.shape, 10**6, 95, None, 5, None)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    expected = prefill(tiny.model, still, ids, policies)
    torch.testing.assert_close(
        prefill(tiny.model, made, ids, policies), expected, atol=2e-4, rtol=2e-4
    )


def test_first_entries_stay_first_and_lines_end_together(llama: Tiny) -> None:
    talk = opened(llama, method="snapkv:window=8", budget="30", recall="off")
    said(talk, " ".join(str(3 + 7 * i % 190) for i in range(120)))
    before = talk.cache
    made = compacted(llama.model, before, 20)
    assert made.seen == 20
    for layer, old in zip(made.layers, before.layers, strict=True):
        (head_group,), (held,) = layer.head_groups, old.head_groups
        order = held.positions[0, :, : held.used].sort(-1).values
        assert head_group.used == 20
        for head in range(len(head_group.heads)):
            first = [p for p in order[head].tolist() if p < 4]
            places = head_group.residual_positions[0, head].tolist()
            assert places[: len(first)] == first
            assert places[len(first) :] == [*range(len(first), 20)]
            kept = [*order[head].tolist()[:4], *order[head].tolist()[-16:]]
            values = held.values[0, head, held.positions[0, head, : held.used].argsort()]
            wanted = torch.cat([values[:4], values[-16:]])
            assert len(kept) == 20 and head_group.residual_values[0, head].equal(wanted)


GIVEN: dict[str, dict[str, Any]] = {
    "recall": {"budget": "40"},
    "forget": {"budget": "40", "recall": "off"},
    "full": {"method": "full"},
    "bits": {"budget": "60", "kv_bits": "4g32"},
    "h2o": {"method": "h2o", "budget": "40", "recall": "off"},
    "pyramid": {"method": "pyramidkv:window=8", "budget": "40"},
    "minicache": {"method": "minicache", "budget": "40", "recall": "off"},
    "streaming": {"method": "streaming", "budget": "40"},
    "lminfinite": {"method": "lminfinite", "budget": "40"},
}


@pytest.mark.cases(1, 8)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3-partial", "llama4"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_conversation_goes_on_for_as_long_as_it_likes(architecture: str, name: str) -> None:
    tiny = make_tiny(architecture, **SMALL)
    talk = opened(tiny, beyond_context="compact", **GIVEN[name])
    told: list[str] = []
    for turn in range(20):
        text = " ".join(str(3 + (7 * i + turn) % 190) for i in range(40))
        pieces = list(talk.stream(text))
        assert len(pieces) >= 2
        assert talk.cache.seen == len(talk.token_ids) < 256
        told += [note for note in pieces[-1].metrics.notes if "outgrew the 256 tokens" in note]
    assert len(talk.messages) == 40 and len(told) >= 4


def test_it_is_refused_unless_it_may_forget() -> None:
    tiny = make_tiny("llama", **SMALL)
    text = " ".join(str(3 + i % 190) for i in range(120))
    talk = opened(tiny, budget="40")
    said(talk, text)
    said(talk, text)
    with pytest.raises(ContextError, match="--beyond-context compact"):
        said(talk, text)
    pieces = list(talk.stream("5 6 7 8 9 10 11 12 13", beyond_context="compact"))
    (note,) = pieces[-1].metrics.notes
    assert "outgrew the 256 tokens" in note and "the rest is forgotten" in note
    with pytest.raises(ContextError):
        said(talk, f"{text} {text} {text}")


def test_what_was_said_before_cannot_be_gone_back_to() -> None:
    tiny = make_tiny("llama", **SMALL)
    talk = opened(tiny, budget="40", beyond_context="compact")
    text = " ".join(str(3 + i % 190) for i in range(100))
    said(talk, text, "5 6", text, text, "9 10")
    with pytest.raises(SettingError, match="message 2 cannot be gone back to"):
        list(talk.edit(2, "1 2"))
    before = [*talk.messages]
    edited = heard(talk.edit(4, "11 12"))
    assert talk.messages[:6] == before[:6] and len(edited) == 5
    talk.switch(0)
    assert talk.messages == before


def test_rotations_that_change_with_the_length_are_refused() -> None:
    tiny = make_tiny("phi3-longrope", **SMALL)
    talk = opened(tiny, budget="40", beyond_context="compact")
    text = " ".join(str(3 + i % 190) for i in range(100))
    said(talk, text, text)
    with pytest.raises(SettingError, match=r"longrope.*: use refuse"):
        said(talk, text)
