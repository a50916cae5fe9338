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
from kvlite.engine.prefill import prefill
from kvlite.errors import OutOfMemory
from kvlite.memory.oom import OOMPolicy
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.load import LoadedModel
from kvlite.model.source import find_model
from tests.conftest import make_tiny
from tests.cuda import guard
from tests.test_packed import random_ids

if not guard.POSSIBLE:
    pytest.skip("needs a torch without CUDA, triton and g++", allow_module_level=True)

from tests.cuda.fake_cuda import fake_cuda
from tests.cuda.test_on_cuda import forgo_loops, read, two_turns

CARDS = torch.device("cuda", 0), torch.device("cuda", 1)


def on_one(name: str) -> LoadedModel:
    return make_tiny(name, "cuda").model


def laid_out(name: str) -> LoadedModel:
    """A tiny model, all but its first layer on the second card."""
    model = on_one(name)
    model.cards = (CARDS[0], *CARDS[1:] * (model.shape.layers - 1))
    layers = iter(model.module.model.layers)
    for card, group in zip(model.cards, model.shape.layer_groups, strict=True):
        for _ in group:
            next(layers).to(card)
    return model


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"method": "snapkv:per_head=true", "recall": 16}),
    ("llama", {"method": "h2o", "bits": "4"}),
    ("llama", {"method": "kvzip"}),  # all layers' scores are compared
    ("qwen3-next", {"method": "spans"}),  # recurrent layers run with others
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "given"), WAYS, ids=str)
def test_logits_are_those_of_one_card(name: str, given: dict[str, Any]) -> None:
    with fake_cuda(count=2):
        one, two = (read(make(name), **given) for make in (on_one, laid_out))
        for _ in range(3):
            assert one.logits.cpu().equal(two.logits.cpu())
            one.step(), two.step()


def test_hidden_states_of_any_card_become_logits() -> None:
    with fake_cuda(count=2):
        model = laid_out("llama")
        hidden = torch.randn(3, model.shape.hidden, device=CARDS[1])
        assert model.logits(hidden).equal(model.logits(hidden.to(CARDS[0])))


def test_memory_is_looked_for_on_a_layers_own_card() -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError

    with fake_cuda(count=2):
        model, asked = laid_out("llama"), list[torch.device]()
        oom_policy = OOMPolicy(model.device, model.cards)
        oom_policy.free = lambda device: asked.append(device) or 1 << 40
        policies = layer_policies(parse_method("full"), model.shape, 80, 80)
        prefill(model, model.empty_cache(), random_ids(80, 1), policies, oom_policy=oom_policy)
        assert asked == [*model.cards]
        with pytest.raises(OutOfMemory, match=r"on cuda:0 with .* free and cuda:1 with .* free"):
            oom_policy.run(fails, {})


@pytest.mark.long
def test_what_was_saved_goes_on(tmp_path: Path) -> None:
    """Each layer comes back to its card, with its host store and its index."""
    given = {"method": "spans", "recall": "ram"}
    with fake_cuda(count=2):
        expected = two_turns(on_one("llama"), tmp_path / "card.kv", **given)
        assert two_turns(laid_out("llama"), tmp_path / "cards.kv", **given) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, and the embedded model's tokenizer."""
    made = tmp_path_factory.mktemp("cards")
    make_tiny("llama").model.module.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_model("smollm2-135m") / name, made)
    return made


def opened(folder: Path, device: str, **given: Any) -> Runner:
    return open_runner(Settings(model=str(folder), device=device, weights="fp32", **given))


def test_a_model_is_loaded_as_it_is_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer with its weights, cache and index on its card, and the same answer as on a CPU."""
    forgo_loops(monkeypatch)
    ids, usual = random_ids(130, 1)[0].tolist(), {"budget": "60", "max_new_tokens": 12}
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
        assert answer.metrics.no_graph == "layers are on several cards"
        assert talk.store is not None
        module = runner.model.module
        weights, kv = dict.fromkeys(CARDS, 0), dict.fromkeys(CARDS, 0)
        weights[CARDS[0]] = module.lm_head.weight.nbytes + module.model.embed_tokens.weight.nbytes
        for index, card in enumerate(runner.model.cards):
            aside = talk.store.layers[index].index
            assert aside is not None
            own = [*runner.model.layers[index].parameters()]
            kept = [*talk.cache.layers[index].tensors, *aside.tensors]
            assert {tensor.device for tensor in (*own, *kept)} == {card}
            weights[card] += sum(tensor.nbytes for tensor in own)
            kv[card] += sum(tensor.nbytes for tensor in kept)
        for card, planned in zip(CARDS, runner.plan.cards, strict=True):
            assert weights[card] == pytest.approx(planned.weights, rel=0.01)
            assert 0 < kv[card] <= planned.kv  # of more tokens


@pytest.mark.long
def test_blocks_of_a_file_are_on_their_layers_card() -> None:
    given = {"weights": "gguf", "recall": "off", "max_new_tokens": 2}
    expected = open_runner(Settings(**given)).generate([5, 6, 7], ignore_eos=True)
    with fake_cuda(count=2):
        runner = open_runner(Settings(device="cuda:0,cuda:1", **given))
        assert runner.generate([5, 6, 7], ignore_eos=True).token_ids == expected.token_ids
        module, held = runner.model.module, dict.fromkeys(CARDS, 0)
        tensors = [*module.parameters(), *module.buffers()]
        for tensor in {each.data_ptr(): each for each in tensors}.values():
            held[tensor.device] += tensor.nbytes
        assert runner.plan is not None
        for card, planned in zip(CARDS, runner.plan.cards, strict=True):
            assert held[card] == pytest.approx(planned.weights, rel=0.01)
