"""A decode step as one program: with a CUDA graph's double it takes the plain step's tokens."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVCache, KVHeadGroup, parse_kv_bits
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.engine import cache_growth
from kvlite.engine.cuda_graph import WORTHWHILE, Capture, GraphDecoder, Replay
from kvlite.engine.prefill import prefill
from kvlite.engine.sampling import Sampler
from kvlite.engine.step import StepRows, decode_step
from kvlite.engine.step_program import StepProgram
from kvlite.methods.budget import method_and_budget
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import LayerPolicy, layer_policies
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore, Recall
from tests import graph_double
from tests.conftest import Tiny, make_tiny

PROMPT, BUDGET, STEPS = 150, 48, 70

# Tokens at which layers grow, so that a plain step takes them, are at most so many of `STEPS`.
GROWS = 2

GREEDY = Settings(temperature=0)
CONVERSATIONS: list[dict[str, Any]] = [
    {"method": "h2o", "budget": "40", "recall": "off"},
    {"method": "spans", "budget": "60", "recall": "off"},
    {"method": "snapkv", "budget": "60", "recall": "off", "kv_bits": "4"},
]


@dataclass
class Read:
    """A prompt that was read, and what decodes goes on from."""

    model: LoadedModel
    cache: KVCache
    policies: list[LayerPolicy]
    logits: Tensor
    token_ids: list[int]
    recall: Recall | None = None

    def decoder(
        self, settings: Settings = GREEDY, capture: Capture = graph_double.capture
    ) -> GraphDecoder:
        """One that goes on from it."""
        return GraphDecoder(
            self.model, Sampler(EngineConfig.from_settings(settings), self.model.device), capture
        )

    def rows(self, token: int) -> StepRows:
        """A token as the row of a step."""
        given = torch.tensor([[token]]), self.policies, self.recall
        return StepRows(self.model, self.cache, *given)

    def enter(self, token: int) -> None:
        """Take a plain step."""
        given = torch.tensor([token], device=self.model.device)
        self.logits = decode_step(self.model, self.cache, given, self.policies, self.recall)
        self.token_ids.append(token)

    def replay(self, graphs: GraphDecoder, token: int, *, ahead: bool = False) -> None:
        """Take a step of a graph, or else a plain one."""
        logits = graphs.step([self.rows(token)], self.token_ids, ahead=ahead)
        if logits is None:
            self.enter(token)
        else:
            self.logits = logits
            self.token_ids.append(token)


def read(
    tiny: Tiny,
    method: str,
    budget: int = BUDGET,
    prompt: int = PROMPT,
    bits: str = "16",
    recall: int | None = None,
) -> Read:
    model = tiny.model
    chosen = method_and_budget(method, str(budget))[0].fitted(model.shape, model.calibration)
    cache = model.empty_cache()
    policies = layer_policies(chosen, model.shape, budget, prompt, bits=parse_kv_bits(bits))
    ids = torch.randint(3, 199, (1, prompt), generator=torch.Generator().manual_seed(1))
    store = None if recall is None else HostKVStore.empty(model.shape, model.dtype, None)
    reserve = 0 if store is None else STEPS + WORTHWHILE
    logits = prefill(model, cache, ids, policies, store=store, reserve=reserve)
    with torch.inference_mode():  # free slots may be anything
        for group in (group for layer in cache.layers for group in layer.head_groups):
            group.residual_keys[:, :, group.residual_len :] = torch.nan
            group.residual_values[:, :, group.residual_len :] = torch.nan
    own = None if store is None or recall is None else Recall(store, recall)
    return Read(model, cache, policies, logits, ids[0].tolist(), own)


def state(cache: KVCache, recall: Recall | None = None) -> list[Any]:
    """All that later steps depend on; which slot an entry comes back to is open."""
    groups = [group for layer in cache.layers for group in layer.head_groups]
    lines = [group.positions[:, :, : group.used] for group in groups]
    held = [(each if recall is None else each.sort(-1).values).tolist() for each in lines]
    return [cache.seen, [(group.used, group.history_index) for group in groups], held]


def compare(
    tiny: Tiny,
    method: str,
    steps: int = STEPS,
    settings: Settings = GREEDY,
    *,
    ahead: bool = False,
    capture: Capture = graph_double.capture,
    **options: Any,
) -> GraphDecoder:
    """Answer twice from the same prompt; nothing may differ."""
    plain, mine = read(tiny, method, **options), read(tiny, method, **options)
    graphs = mine.decoder(settings, capture)
    sampler = Sampler(EngineConfig.from_settings(settings), tiny.model.device)
    for _ in range(steps):
        token = sampler(plain.logits, plain.token_ids)
        drawn = graphs.drawn()
        if drawn is None:
            drawn = graphs.sampler(mine.logits, mine.token_ids)
        assert drawn == token, (method, plain.cache.seen)
        plain.enter(token)
        mine.replay(graphs, token, ahead=ahead)
        assert torch.allclose(mine.logits, plain.logits, atol=1e-5), (method, plain.cache.seen)
        same_state = state(mine.cache, mine.recall) == state(plain.cache, plain.recall)
        assert same_state, (method, plain.cache.seen)
    for own, other in zip(mine.cache.layers, plain.cache.layers, strict=True):
        for group, same in zip(own.head_groups, other.head_groups, strict=True):
            for each, as_before in zip(in_order(group), in_order(same), strict=True):
                close = torch.isclose(each, as_before, atol=1e-4)
                # A number between two codes may be rounded to either, as sums are made otherwise.
                assert close.float().mean() > 0.99 if group.segment is not None else close.all()
    if mine.recall is not None and plain.recall is not None:
        same_store(mine.recall, plain.recall)
    return graphs


def in_order(group: KVHeadGroup) -> list[Tensor]:
    """What a head group holds, ascending in position."""
    order = group.positions[:, :, : group.used].argsort(-1)
    lines = order[..., None].expand(-1, -1, -1, group.residual_keys.shape[3])
    held = [group.keys.gather(2, lines), group.values.gather(2, lines)]
    rows = [] if group.rows is None else [group.rows]
    return held + [
        each.gather(3, order[:, :, None].expand(-1, -1, each.shape[2], -1)) for each in rows
    ]


def same_store(mine: Recall, plain: Recall) -> None:
    """What was told and counted is the same."""
    assert (mine.num_requested, mine.num_fetched) == (plain.num_requested, plain.num_fetched)
    assert mine.num_fetched > 0 or not mine.entries
    for own, other in zip(mine.store.layers, plain.store.layers, strict=True):
        both = zip(in_order(own.head_group), in_order(other.head_group), strict=True)
        assert own.head_group.used == other.head_group.used
        assert all(torch.allclose(one, two, atol=1e-5) for one, two in both)
        assert own.index is not None and other.index is not None
        known = own.index.used
        assert known == other.index.used
        assert own.index.signs[:, :, :known].equal(other.index.signs[:, :, :known])


TOGETHER: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "h2o", "budget": 60},
    {"method": "spans", "bits": "4", "budget": 80, "prompt": 120},
    {"method": "uncomp", "budget": 30},
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["llama", "qwen3-next", "gemma3n"])
def test_rows_of_several_conversations(name: str, plain_torch: None) -> None:
    """Each is as by itself, also once another has left."""
    tiny = make_tiny(name)
    plain, mine = ([read(tiny, **way) for way in TOGETHER] for _ in range(2))
    graphs = GraphDecoder(tiny.model, None, graph_double.capture)
    for done in range(STEPS):
        if done == STEPS // 2:
            del plain[1], mine[1]
        tokens = [int(each.logits.argmax()) for each in plain]
        for each, token in zip(plain, tokens, strict=True):
            each.enter(token)
        logits = graphs.step([each.rows(token) for each, token in zip(mine, tokens, strict=True)])
        assert logits is not None, graphs.reason
        for one, other, row in zip(mine, plain, logits, strict=True):
            assert torch.allclose(row, other.logits[0], atol=1e-4)
            assert state(one.cache) == state(other.cache)
    assert graphs.steps == STEPS


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled loops, which only a CPU has."""
    for module in ("cache.quantization.hadamard", "engine.implementations"):
        monkeypatch.setattr(f"kvlite.{module}.has_compiled", lambda device: False)


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("method", ["lminfinite", "h2o", "streaming", "kvx", "tova"])
def test_a_budget_that_is_reached_while_answering(
    llama: Tiny, plain_torch: None, method: str
) -> None:
    graphs = compare(llama, method, bits="4", budget=200, prompt=100, steps=220)
    assert graphs.steps > 100


def test_what_needs_the_host_is_left_to_plain_steps(llama: Tiny) -> None:
    graphs = compare(llama, "spans", steps=4, recall=8)
    assert graphs.steps == 0
    assert graphs.reason == "the host KV store is not in pinned memory that the GPU reads"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("method", "bits", "block", "recordings"),
    [
        ("full", "16", None, 1),
        ("full", "16", 64, 3),
        ("full", "4", None, 1),
        ("full", "kivi2", None, 1),
        ("h2o", "k8v4", None, 1),
        ("full", "8", 64, 3),
    ],
)
def test_a_graph_is_recorded_anew_where_storage_moves(
    llama: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    plain_torch: None,
    method: str,
    bits: str,
    block: int | None,
    recordings: int,
) -> None:
    """After a block of tokens, which is longer than this answer; quantizing in between moves
    none."""
    recorded = []
    if block is not None:
        monkeypatch.setattr(cache_growth, "ROOM", block)

    def counting(program: StepProgram) -> Replay:
        recorded.append(1)
        return graph_double.capture(program)

    plain, each = (read(llama, method, budget=400, bits=bits) for _ in range(2))
    graphs = each.decoder(capture=counting)
    for step in range(140):
        token = int(each.logits.argmax())
        each.replay(graphs, token, ahead=step % 3 == 0)
        plain.enter(token)
        assert torch.allclose(plain.logits, each.logits, atol=1e-4)
    assert state(each.cache) == state(plain.cache)
    assert (len(recorded), graphs.steps) == (recordings, 140)


def test_what_cannot_be_recorded_is_left_to_plain_steps(llama: Tiny) -> None:
    def failing(program: StepProgram) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    each = read(llama, "h2o")
    before = state(each.cache)
    graphs = each.decoder(capture=failing)
    assert graphs.step([each.rows(5)], each.token_ids) is None
    assert graphs.reason.startswith("it failed: operation not permitted")
    assert state(each.cache) == before and not each.cache.writing
    assert graphs.step([each.rows(5)], each.token_ids) is None


def test_a_fault_of_ours_while_recording_is_not_hidden(llama: Tiny) -> None:
    def failing(program: StepProgram) -> Replay:
        raise TypeError("made up by a test")

    each = read(llama, "h2o")
    graphs = each.decoder(capture=failing)
    with pytest.raises(TypeError, match="made up"):
        graphs.step([each.rows(5)], each.token_ids)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"temperature": 0, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_by_plain_steps(llama: Tiny, given: dict[str, Any]) -> None:
    """Whether or not the next step is launched before its token is known."""
    settings = Settings(**{"temperature": 0.9, "seed": 3, **given})
    for ahead in (False, True):
        assert compare(llama, "snapkv", 30, settings, ahead=ahead).steps >= 30 - GROWS


def test_what_was_launched_ahead_need_not_count(llama: Tiny) -> None:
    """A plain step in its place, and the next draw, are as if it had not been."""
    settings = Settings(temperature=0.9, seed=3)
    plain, mine = read(llama, "snapkv"), read(llama, "snapkv")
    graphs, sampler = (
        mine.decoder(settings),
        Sampler(EngineConfig.from_settings(settings), llama.model.device),
    )
    said: list[int] = []
    for _ in range(40):
        said.append(sampler(plain.logits, plain.token_ids))
        plain.enter(said[-1])
    for place, token in enumerate(said):
        drawn = graphs.drawn()
        assert token == (graphs.sampler(mine.logits, mine.token_ids) if drawn is None else drawn)
        if place % 5 == 4:
            mine.enter(token)
        else:
            mine.replay(graphs, token, ahead=True)
    assert state(mine.cache) == state(plain.cache)
    assert graphs.steps > 30


@pytest.mark.long
@pytest.mark.parametrize("given", CONVERSATIONS, ids=str)
def test_conversations_go_through_graphs(
    llama: Tiny, plain_torch: None, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns, branches and answers drawn again are what they are without."""

    def talk() -> list[Any]:
        runner = Runner(llama.model, Settings(**given))
        talking = runner.conversation(max_new_tokens=20, temperature=0.7, seed=3)
        said = [talking.generate(list(range(3, 120)), ignore_eos=True).token_ids]
        said.append(talking.generate(list(range(50, 60)), ignore_eos=True).token_ids)
        texts = [list(talking.stream("7 8 9")), list(talking.regenerate(seed=4))]
        talking.undo()
        texts.append(list(talking.stream("11 12")))
        drawn, turn = [[piece.token_id for piece in each] for each in texts], talking.context.turn
        return [said, drawn, state(talking.cache, turn and turn.recall)]

    plain, made = talk(), list[GraphDecoder]()

    def decoder(model: LoadedModel, sampler: Sampler) -> GraphDecoder:
        made.append(GraphDecoder(model, sampler, graph_double.capture))
        return made[-1]

    monkeypatch.setattr("kvlite.conversation.turn.graph_decoder", decoder)
    assert talk() == plain
    assert all(graphs.steps > 10 for graphs in made)
