"""A model whose layers are on two cards, which a CPU stands in for: the same tokens as on one, each
layer with all that is kept for it on its own card, and no operation on tensors of both."""

import shutil
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401  # before there is a device that its kernels would be for
import pytest
import torch

from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner, open_runner
from kvlite.model.load import LoadedModel
from kvlite.model.source import find_model
from tests.conftest import make_tiny
from tests.cuda import guard
from tests.test_packed import random_ids

if not guard.POSSIBLE:
    pytest.skip("needs a torch without CUDA, triton and g++", allow_module_level=True)

from tests.cuda.fake_cuda import fake_cuda
from tests.cuda.test_on_cuda import SIZES, WAYS, forgo_loops, two_turns

CARDS = torch.device("cuda", 0), torch.device("cuda", 1)
FOUR = {**SIZES, "num_hidden_layers": 4}
# The second card has most, as where the first has a large embedding.
LIES = (CARDS[0], CARDS[1], CARDS[1], CARDS[1])


def laid_out(name: str, **sizes: Any) -> LoadedModel:
    """A tiny model, three of its four layers on the second card."""
    model = make_tiny(name, "cuda", **sizes).model
    for layer, card in zip(model.module.model.layers, LIES, strict=True):
        layer.to(card)
    model.cards = LIES
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("given", [way for way in WAYS if "scores" not in way], ids=str)
def test_a_conversation_on_two_cards_is_that_of_a_cpu(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgo_loops(monkeypatch)
    expected = two_turns(make_tiny("llama", **FOUR).model, tmp_path / "cpu.kv", **given)
    with fake_cuda(count=2):
        assert two_turns(laid_out("llama", **FOUR), tmp_path / "cards.kv", **given) == expected


def opened(folder: Path, device: str, **given: Any) -> Runner:
    return open_runner(Settings(model=str(folder), device=device, weights="fp32", **given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, and the embedded model's tokenizer."""
    made = tmp_path_factory.mktemp("cards")
    make_tiny("llama", **FOUR).model.module.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_model("smollm2-135m") / name, made)
    return made


def test_a_model_is_loaded_as_it_is_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer with its weights, cache, host store and index on its card."""
    forgo_loops(monkeypatch)
    ids, usual = random_ids(130, 1)[0].tolist(), {"budget": "60", "max_new_tokens": 20}
    expected = opened(folder, "cpu", **usual).generate(ids, ignore_eos=True)
    with fake_cuda(count=2):
        runner = opened(folder, "all", **usual)
        assert runner.plan is not None
        counts = [card.layers for card in runner.plan.cards]
        assert min(counts) > 0
        assert runner.model.cards == tuple(
            card for card, count in zip(CARDS, counts, strict=True) for _ in range(count)
        )
        talk = runner.conversation()
        answer = talk.generate(ids, ignore_eos=True)
        assert answer.token_ids == expected.token_ids
        assert talk.store is not None
        for index, card in enumerate(runner.model.cards):
            aside = talk.store.layers[index].index
            kept = [*talk.cache.layers[index].tensors, *(aside.tensors if aside else ())]
            kept += runner.model.layers[index].parameters()
            assert {tensor.device for tensor in kept} == {card}
        assert answer.metrics.no_graph == "layers are on several cards"
