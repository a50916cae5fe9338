"""Gemma 3n and 4: layers that attend to another's keys, inputs made for each layer, streams, and
heads of two sizes."""

import pytest
import torch
from torch import Tensor

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.prefill import Prefill, prefill
from kvlite.engine.slices import in_one_go
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import layer_policies
from tests.conftest import Tiny, make_tiny
from tests.test_recall import EXACT, last_logits, logits_of_the_whole

NAMES = ["gemma3n", "gemma4", "gemma4-e"]
LENDING = ["gemma3n", "gemma4-e"]
IDS = [3 + 7 * i % 190 for i in range(150)]


@pytest.fixture(scope="module", params=NAMES)
def gemma(request: pytest.FixtureRequest) -> Tiny:
    return make_tiny(request.param)


def dense(tiny: Tiny, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = tiny.reference(ids).logits
    return logits


@pytest.mark.cases(3, 6)
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_every_token_of_any_chunk_gets_the_logits_of_transformers(gemma: Tiny, chunk: int) -> None:
    """Also where what follows each token is wanted, not the last alone."""
    model, ids = gemma.model, torch.tensor([IDS, IDS[::-1]])
    policies = layer_policies(Full(), model.shape, 10**6, len(IDS))
    expected = dense(gemma, ids)
    one, other = (model.empty_cache(2) for _ in range(2))
    assert (prefill(model, one, ids, policies, chunk=chunk) - expected[:, -1]).abs().max() < 1e-4
    with torch.inference_mode():
        reading = Prefill(model, other, ids, policies, chunk=chunk, whole=True)
        in_one_go(reading.read())
        rows = torch.stack([model.logits(reading.hidden[:, at]) for at in range(len(IDS))], 1)
    assert (rows - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LENDING)
def test_what_a_layer_is_told_of_a_token_is_what_transformers_tells_it(
    name: str, dtype: torch.dtype
) -> None:
    """Of tokens whose numbers need three digits, some of which Gemma 3n has no input for."""
    vocab, known = 70_000, 70_000 if name == "gemma4-e" else 69_000
    model = make_tiny(name, dtype=dtype, vocab_size=vocab, vocab_size_per_layer_input=known).model
    ids, inner = torch.tensor([[3, 300, 68_999, 69_500, 255, 256, 65_536]]), model.module.model
    assert model.carried is not None
    with torch.no_grad():
        said = inner.get_per_layer_inputs(*[ids, None][: 1 + (name == "gemma4-e")])
        expected = inner.project_per_layer_inputs(inner.embed_tokens(ids), said)
        for layer in (0, 5):
            told = model.carried.layer_input(model.embed(ids), layer)
            torch.testing.assert_close(told, expected[:, :, layer], rtol=2e-2, atol=2e-2)


@pytest.mark.cases(1, 8)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("bits", ["16", "4"])
def test_every_turn_that_recalls_begins_as_if_nothing_had_been_dropped(
    gemma: Tiny, name: str, bits: str
) -> None:
    if name == "uncomp":
        name = "uncomp:groups=1"  # layers that see everything may have a single KV head
    settings = {"method": name, "budget": "48", "recall": "ram", "kv_bits": bits}
    talk = Conversation(gemma.model, Settings(max_new_tokens=9, chunk=64).replace(settings))
    for turn in range(2):
        logits = last_logits(talk, IDS[70 * turn : 70 * turn + 70])
        ids = talk.token_ids[: len(talk.token_ids) - 8]
        assert (logits - logits_of_the_whole(gemma, ids)).abs().max() < 1e-4
