"""A decode step as one program: with a CUDA graph's double it takes the plain step's tokens."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVCache
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.conversation.turn import Turn
from kvlite.engine.cuda_graph import WORTHWHILE, GraphDecoder, Replay
from kvlite.engine.decode import decode_step
from kvlite.engine.prefill import prefill
from kvlite.engine.step_program import StepProgram
from kvlite.methods.budget import method_and_budget
from kvlite.methods.layer_policy import LayerPolicy, layer_policies
from kvlite.model.layers import Layers
from kvlite.model.load import LoadedModel
from tests import graph_double
from tests.conftest import ARCHITECTURES, Tiny, make_tiny

PROMPT, BUDGET, STEPS = 150, 48, 70

# Tokens at which layers grow, so that a plain step takes them, are at most so many of `STEPS`.
GROWS = 2


@dataclass
class Read:
    """A prompt that was read, and what decodes goes on from."""

    model: LoadedModel
    cache: KVCache
    policies: list[LayerPolicy]
    logits: Tensor


def read(tiny: Tiny, method: str, budget: int = BUDGET, prompt: int = PROMPT) -> Read:
    model = tiny.model
    chosen = method_and_budget(method, str(budget))[0].fitted(model.shape, model.calibration)
    cache = model.empty_cache()
    policies = layer_policies(chosen, model.shape, budget, prompt)
    ids = torch.randint(3, 199, (1, prompt), generator=torch.Generator().manual_seed(1))
    return Read(model, cache, policies, prefill(model, cache, ids, policies))


def state(cache: KVCache) -> list[Any]:
    """All that later steps depend on."""
    groups = [group for layer in cache.layers for group in layer.head_groups]
    held = [group.residual_positions[:, :, : group.used].tolist() for group in groups]
    return [cache.seen, [(group.used, group.history_index) for group in groups], held]


def compare(tiny: Tiny, method: str, steps: int = STEPS, **options: int) -> GraphDecoder:
    """Answer twice from the same prompt; nothing may differ."""
    plain, mine = read(tiny, method, **options), read(tiny, method, **options)
    graphs = GraphDecoder(mine.model, graph_double.capture)
    for _ in range(steps):
        token = int(plain.logits.argmax())
        given = torch.tensor([token])
        plain.logits = decode_step(plain.model, plain.cache, given, plain.policies)
        logits = graphs.step(mine.cache, mine.policies, token)
        if logits is None:
            logits = decode_step(mine.model, mine.cache, given, mine.policies)
        assert torch.allclose(logits, plain.logits, atol=1e-5), (method, plain.cache.seen)
        same_state = state(mine.cache) == state(plain.cache)
        assert same_state, (method, plain.cache.seen)
    for own, other in zip(mine.cache.layers, plain.cache.layers, strict=True):
        for group, same in zip(own.head_groups, other.head_groups, strict=True):
            filled = slice(0, group.used)
            for each, as_before in (
                (group.residual_keys, same.residual_keys),
                (group.residual_values, same.residual_values),
            ):
                assert torch.allclose(each[:, :, filled], as_before[:, :, filled], atol=1e-5)
            if group.rows is not None and same.rows is not None:
                assert torch.allclose(group.rows, same.rows, atol=1e-4)
    return graphs


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "method",
    [
        "full",
        "spans",
        "snapkv",
        "pyramidkv",
        "kvx",
        "kvx:recent=4",
        "h2o",
        "h2o:norm=mean",
        "streaming",
        "streaming:roll=false",
        "tova:per_head=true",
        "keydiff",
        "expectedattention",
        "snapkv:per_head=true",
        "uncomp",
        "random",
    ],
)
def test_replays_are_plain_steps(llama: Tiny, method: str) -> None:
    graphs = compare(llama, method)
    assert graphs.steps >= STEPS - GROWS
    assert graphs.reason == ""


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture(name: str) -> None:
    graphs = compare(make_tiny(name), "snapkv", steps=20)
    refused = (
        "the model's rotations change with the length",
        "recurrent layers carry a state from token to token",
    )
    assert (graphs.steps > 10) == (graphs.reason not in refused)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("tova", "tova compares heads"),
        ("lminfinite", "lminfinite attends under a mask"),
        ("kvx:middle=example", "kvx trims a layer that has grown too long"),
    ],
)
def test_what_needs_the_host_is_left_to_plain_steps(llama: Tiny, method: str, reason: str) -> None:
    graphs = compare(llama, method, steps=4)
    assert (graphs.steps, graphs.reason) == (0, reason)


def test_a_graph_is_recorded_anew_where_storage_moves(llama: Tiny) -> None:
    recorded = []

    def counting(program: StepProgram) -> Replay:
        recorded.append(1)
        return graph_double.capture(program)

    each = read(llama, "full")
    graphs = GraphDecoder(each.model, counting)
    for _ in range(140):
        token = int(each.logits.argmax())
        logits = graphs.step(each.cache, each.policies, token)
        given = torch.tensor([token])
        each.logits = (
            decode_step(each.model, each.cache, given, each.policies) if logits is None else logits
        )
    # Room for 64 tokens, the first of which a plain step writes.
    assert len(recorded) == 3
    assert graphs.steps == 140 - 3


def test_what_cannot_be_recorded_is_left_to_plain_steps(llama: Tiny) -> None:
    def failing(program: StepProgram) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    each = read(llama, "h2o")
    before = state(each.cache)
    graphs = GraphDecoder(each.model, failing)
    assert graphs.step(each.cache, each.policies, 5) is None
    assert graphs.reason.startswith("it failed: operation not permitted")
    assert state(each.cache) == before and not each.cache.writing
    assert graphs.step(each.cache, each.policies, 5) is None


@pytest.mark.parametrize("method", ["h2o", "streaming"])
def test_a_layer_grows_up_to_its_budget_before_anything_is_evicted(
    llama: Tiny, method: str
) -> None:
    graphs = compare(llama, method, steps=80, budget=400)
    assert graphs.steps > 60 or method == "h2o"


def test_layers_that_were_moved_are_not_served(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = read(llama, "streaming")
    program = StepProgram(each.model, each.cache, each.policies)
    assert program.serves(each.cache, each.policies)
    monkeypatch.setattr(each.model, "layers", Layers(each.model.layers.modules))
    assert not program.serves(each.cache, each.policies)


@pytest.mark.long
def test_conversations_go_through_graphs(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns, branches and answers drawn again are what they are without."""

    def talk() -> list[Any]:
        runner = Runner(llama.model, Settings(method="h2o", budget="40", recall="off"))
        talking = runner.conversation(max_new_tokens=20, temperature=0.7, seed=3)
        said = [talking.generate(list(range(3, 120)), ignore_eos=True).token_ids]
        said.append(talking.generate(list(range(50, 60)), ignore_eos=True).token_ids)
        texts = [list(talking.stream("7 8 9")), list(talking.regenerate(seed=4))]
        talking.undo()
        texts.append(list(talking.stream("11 12")))
        return [said, [[piece.token_id for piece in each] for each in texts], state(talking.cache)]

    plain, made = talk(), []
    reading = Turn.read

    def read_and_record(turn: Turn, callbacks: Any) -> None:
        reading(turn, callbacks)
        turn.graphs = GraphDecoder(turn.model, graph_double.capture)
        made.append(turn.graphs)

    monkeypatch.setattr(Turn, "read", read_and_record)
    assert talk() == plain
    assert all(graphs.steps > 10 for graphs in made)


def test_few_tokens_are_not_worth_a_graph(llama: Tiny) -> None:
    each = read(llama, "full")
    decode_step(each.model, each.cache, torch.tensor([5]), each.policies)
    room = min(group.room for layer in each.cache.layers for group in layer.head_groups)
    for _ in range(room - WORTHWHILE + 1):
        decode_step(each.model, each.cache, torch.tensor([5]), each.policies)
    assert GraphDecoder(each.model, graph_double.capture).step(each.cache, each.policies, 5) is None
