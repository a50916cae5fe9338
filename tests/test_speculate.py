"""Speculation changes how many steps an answer takes, and nothing else."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvlite
from kvlite.cache import KVCache
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.steps_together import StepsTogether
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.cuda_graph import GraphDecoder, Replay
from kvlite.engine.prefill import prefill
from kvlite.engine.prompt_lookup import PromptLookup
from kvlite.engine.runs_with import as_table
from kvlite.engine.speculate import WIDEST, Pace, Speculation
from kvlite.engine.step_program import StepProgram
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import LayerPolicy, layer_policies
from kvlite.model.load import LoadedModel
from tests import graph_double
from tests.conftest import Tiny, make_tiny
from tests.faults import Faults

IDS = [3 + 7 * i % 190 for i in range(60)]

# Ways to hold a cache to which tokens are appended.
APPENDING: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "nothing dropped": {},
    "dropped and forgotten": {"budget": "30", "recall": "off"},
    "ragged heads": {"method": "snapkv:per_head=true,window=8", "budget": "30", "recall": "off"},
    "a window not full yet": {"method": "streaming", "budget": "90", "recall": "off"},
    "settled by a step": {
        "method": "simlayerkv:threshold=0.3,recent=20,detect=decode",
        "budget": "500",
        "recall": "off",
    },
    "reconstructed": {"method": "kvzip", "budget": "30", "recall": "off"},
    "in 4 bits": {"method": "full", "kv_bits": "4"},
    "merged layers": {"method": "minicache", "recall": "off"},
    "recalled": {"budget": "36", "recall_entries": 8},
    "recalled by ragged heads": {
        "method": "snapkv:per_head=true,window=8",
        "budget": "36",
        "recall_entries": 8,
    },
    "recalled into 4 bits": {"budget": "48", "recall_entries": 16, "kv_bits": "4"},
    "kept for recall": {"budget": "30", "recall_entries": 0},
}
# Ways to draw.
DRAWN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "min_p": 0.05},
    {"repetition_penalty": 1.4},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "top_p": 0.9},
]


def opened(model: LoadedModel, **given: Any) -> Conversation:
    return kvlite.Runner(model, Settings().replace({"speculate": "auto", **given})).conversation()


@pytest.mark.long
def test_answers_are_distributed_as_without() -> None:
    """All answers of three tokens of a vocabulary of three, by enumeration."""
    sizes: dict[str, Any] = {
        "initializer_range": 0.5,
        "vocab_size": 3,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    tiny = make_tiny("llama", **sizes)
    prompt = [1, 2, 1, 0, 2]
    exact, temperature = {}, 0.7
    for answer in product(range(3), repeat=3):
        ids = torch.tensor([[*prompt, *answer]])
        logits = tiny.reference(ids).logits.detach()[0, len(prompt) - 1 : -1]
        chances = (logits.double() / temperature).softmax(-1)
        exact[answer] = float(chances[range(3), list(answer)].prod())
    given = {"method": "full", "temperature": temperature, "top_k": 0, "top_p": 1.0}
    drawn, count, proposed = Counter[tuple[int, ...]](), 250, 0
    for seed in range(count):
        talk = opened(tiny.model, **given, seed=seed, max_new_tokens=3)
        with proposing(lambda tokens, wanted: [(len(tokens) + 1) % 3] * wanted):
            said = talk.generate(prompt, ignore_eos=True)
        proposed += said.metrics.proposed_tokens
        drawn[tuple(said.token_ids)] += 1
    far = sum(
        (drawn[each] - count * chance) ** 2 / (count * chance) for each, chance in exact.items()
    )
    assert proposed > count / 2
    assert far < 26 + 5 * (2 * 26) ** 0.5  # chi squared, five standard deviations


@contextmanager
def proposing(expected: Callable[[list[int], int], list[int]]) -> Iterator[list[int]]:
    """Let everything that `expected` says, of the tokens so far, be proposed; how many tokens went
    through together, each time."""
    widths: list[int] = []
    run = Speculation._pass

    def ran(self: Speculation, token_ids: list[int]) -> Tensor:
        widths.append(len(token_ids))
        return run(self, token_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "proposed", lambda self, n: expected(self.token_ids, n)[:n])
        patch.setattr(PromptLookup, "chances", lambda self, n: [1.0] * n)
        patch.setattr(Pace, "factor", 0.0)
        patch.setattr(Speculation, "_pass", ran)
        yield widths


def partly(answer: list[int], draw: random.Random) -> Callable[[list[int], int], list[int]]:
    """Proposes what an answer goes on with, with mistakes now and then."""

    def expected(tokens: list[int], count: int) -> list[int]:
        right = answer[len(tokens) :][: draw.randrange(WIDEST)]
        return [*right, *(draw.randrange(3, 199) for _ in range(draw.randrange(4)))]

    return expected


def state(talk: Conversation) -> Any:
    """All that a conversation holds but for the numbers in its cache, and their order."""
    held = [
        (
            head_group.heads,
            head_group.used,
            head_group.positions[..., : head_group.used].sort().values.tolist(),
        )
        for layer in talk.cache.layers
        for head_group in layer.head_groups
    ]
    context = talk.context
    return talk.token_ids, context.pending_ids, talk.cache.seen, talk.cache.nbytes, held


def numbers(talk: Conversation) -> list[torch.Tensor]:
    """Keys and values in the order of their positions."""
    return [
        each.gather(2, order[..., None].expand(-1, -1, -1, each.shape[3]))
        for layer in talk.cache.layers
        for head_group in layer.head_groups
        for order in [head_group.positions[..., : head_group.used].argsort()]
        for each in (head_group.keys, head_group.values)
    ]


def states_of(cache: KVCache) -> list[torch.Tensor]:
    """Of recurrent layers, in the order of the model's."""
    return [
        each
        for _, own in sorted(cache.states.items())
        for _, state in sorted(own.items())
        for each in state.tensors
    ]


def alike(talk: Conversation, plain: Conversation) -> None:
    """Both stand alike, but for rounding; with recall, which rounds queries to find entries, a last
    digit may decide between two of them for a token."""
    least = 1.0 if talk.store is None else 0.95
    assert state(talk) == state(plain)
    for mine, theirs in zip(numbers(talk), numbers(plain), strict=True):
        near = torch.isclose(mine, theirs, atol=1e-5, rtol=1e-5)
        assert near.sum() >= least * near.numel()
    torch.testing.assert_close(*map(states_of, (talk.cache, plain.cache)), atol=1e-4, rtol=1e-4)


@pytest.mark.cases(2, 20)
@pytest.mark.parametrize("drawn", DRAWN, ids=str)
@pytest.mark.parametrize("name", APPENDING)
def test_the_same_answer_in_fewer_steps(llama: Tiny, name: str, drawn: dict[str, Any]) -> None:
    """And the same state after it, whatever of what was proposed comes."""
    base = {"max_new_tokens": 50, **APPENDING[name], **drawn}
    plain = opened(llama.model, speculate="off", **base)
    answer = plain.generate(IDS, ignore_eos=True)
    assert answer.metrics.decode_steps == 49 and not answer.metrics.proposed_tokens
    for seed in range(2):
        talk = opened(llama.model, **base)
        with proposing(partly([*IDS, *answer.token_ids], random.Random(seed))) as widths:
            told = talk.generate(IDS, ignore_eos=True)
        assert told.token_ids == answer.token_ids
        alike(talk, plain)
        metrics = told.metrics
        assert metrics.decode_steps + metrics.accepted_tokens == 49 and metrics.decode_steps < 47
        assert metrics.proposed_tokens == sum(widths) - len(widths)
        assert 0 < metrics.accepted_tokens <= metrics.proposed_tokens
        fills = name == "a window not full yet"
        assert metrics.no_speculation == fills * "a full layer evicts with each token"
    more = {"ignore_eos": True, "max_new_tokens": 12, "speculate": "off"}
    assert talk.generate(IDS[:9], **more).token_ids == plain.generate(IDS[:9], **more).token_ids


@pytest.mark.cases(2, 6)
@pytest.mark.parametrize(
    "name", [name for name, given in APPENDING.items() if "recall_entries" not in given]
)
def test_a_graph_takes_what_is_proposed(
    llama: Tiny, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by plain steps; all passes that find slots, by one recording for a block of tokens."""
    recorded: list[int] = []

    def capture(program: StepProgram) -> Replay:
        recorded.append(len(program.rows))
        return graph_double.capture(program)

    for module in ("cache.quantization.hadamard", "engine.implementations"):
        monkeypatch.setattr(f"kvlite.{module}.has_compiled", lambda device: False)
    base = {"max_new_tokens": 90, **APPENDING[name]}
    plain = opened(llama.model, speculate="off", **base)
    answer = plain.generate(IDS, ignore_eos=True)
    monkeypatch.setattr(
        "kvlite.engine.speculate.graph_decoder", lambda model: GraphDecoder(model, None, capture)
    )
    talk = opened(llama.model, **base)
    with proposing(partly([*IDS, *answer.token_ids], random.Random(1))) as widths:
        told = talk.generate(IDS, ignore_eos=True)
    assert told.token_ids == answer.token_ids
    alike(talk, plain)
    assert told.metrics.accepted_tokens > 10 and len(widths) > 4
    assert recorded == [WIDEST]


@pytest.mark.long
@settings(max_examples=6)
@given(st.integers(0, 25), st.integers(0, 1000), st.sampled_from(DRAWN), st.data())
def test_an_answer_that_is_left_anywhere_leaves_what_it_said(
    stop: int, seed: int, drawn: dict[str, Any], data: st.DataObject
) -> None:
    """Then saved, undone, drawn again or gone on with, it is as without."""
    model = LLAMA.model
    name = data.draw(st.sampled_from(sorted(APPENDING)))
    base = {"max_new_tokens": 25, **APPENDING[name], **drawn}
    whole = opened(model, speculate="off", **base).generate(IDS, ignore_eos=True).token_ids
    talks = [opened(model, speculate=speculates, **base) for speculates in ("off", "auto")]
    plain, talk = talks
    text = " ".join(map(str, IDS))
    with proposing(partly([*IDS, *whole], random.Random(seed))):
        for each in talks:
            pieces = each.stream(text)
            for _ in zip(range(stop), pieces, strict=False):
                pass
            pieces.close()
    alike(talk, plain)
    after = data.draw(st.sampled_from(["go on", "undo", "regenerate", "edit"]))
    with proposing(partly([*IDS, *whole], random.Random(seed))):
        for each in talks:
            if after == "undo" and each.messages:
                each.undo()
            if after == "regenerate" and each.messages:
                list(each.regenerate())
            if after == "edit" and each.messages:
                list(each.edit(1, "5 6 7 8"))
            list(each.stream("11 12 13"))
    assert talk.messages == plain.messages and len(talk.branches) == len(plain.branches)
    alike(talk, plain)


LLAMA = make_tiny("llama")


@pytest.mark.parametrize("ends", ["stop string", "stop token", "cancelled", "length"])
def test_it_ends_where_it_ends_without(llama: Tiny, ends: str) -> None:
    base: dict[str, Any] = {"max_new_tokens": 30, "method": "full", "temperature": 1.5, "seed": 1}
    whole = opened(llama.model, speculate="off", **base).generate(IDS, ignore_eos=True).token_ids
    model, at = llama.model, next(n for n in range(9, 30) if whole[n] not in whole[:n])
    if ends == "stop string":
        base["stop"] = (f"{whole[at]} ",)
    if ends == "stop token":
        model = replace(model, stop_ids=frozenset({whole[at]}))
    if ends == "length":
        base["max_new_tokens"] = at
    talks = [opened(model, speculate=speculates, **base) for speculates in ("off", "auto")]
    found = []
    with proposing(lambda tokens, n: [*IDS, *whole][len(tokens) :]):
        for talk in talks:
            cancel, pieces = Event(), []
            for piece in talk.stream_tokens(IDS, callbacks=Callbacks(cancel=cancel)):
                pieces.append(piece)
                if ends == "cancelled" and len(pieces) == at:
                    cancel.set()
            found.append([(each.token_id, each.text) for each in pieces])
            assert talk.cache.seen == len(IDS) + len(pieces) - 1
    assert found[0] == found[1]
    alike(*talks)


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [{"method": "full"}, APPENDING["recalled"], APPENDING["recalled by ragged heads"]],
    ids=str,
)
def test_where_memory_runs_out_ahead_the_answer_goes_on_one_by_one(
    llama: Tiny, given: dict[str, Any]
) -> None:
    base: dict[str, Any] = {"max_new_tokens": 12, **given}
    plain = opened(llama.model, speculate="off", **base)
    whole = plain.generate(IDS, ignore_eos=True).token_ids
    proposal = proposing(lambda tokens, n: [*IDS, *whole][len(tokens) :])
    with proposal, Faults(traces=True) as faults:
        opened(llama.model, **base).generate(IDS, ignore_eos=True)
    ahead = [at for at, site in enumerate(faults.sites) if "/speculate.py" in "".join(site)]
    assert len(ahead) > 5
    for at in ahead[:: len(ahead) // 4]:
        talk = opened(llama.model, **base)
        proposal = proposing(lambda tokens, n: [*IDS, *whole][len(tokens) :])
        with proposal, Faults([at]) as once:
            answer = talk.generate(IDS, ignore_eos=True)
        assert once.failed == 1 and answer.token_ids == whole
        assert answer.metrics.no_speculation == "memory was short"
        assert not talk.context.oom_policy.taken and not answer.metrics.fallbacks
        alike(talk, plain)


def policies_of(model: LoadedModel, spec: str, budget: int, seen: int) -> list[LayerPolicy]:
    return layer_policies(parse_method(spec), model.shape, budget, seen)


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("settings", "some"),
    [
        ({"method": "full"}, True),
        ({"budget": "30"}, True),
        ({"method": "h2o", "budget": "30"}, False),
        ({"method": "h2o", "budget": "500"}, False),
        ({"method": "tova", "budget": "30"}, False),
        ({"method": "lminfinite", "budget": "30"}, False),
        ({"method": "streaming", "budget": "30"}, False),
        ({"budget": "150", "kv_bits": "4"}, True),
        ({"method": "kvx", "budget": "30"}, False),
        ({"budget": "36", "recall": "auto", "recall_entries": 8}, True),
        ({"budget": "36", "recall": "auto", "recall_entries": 8, "recall_bits": "4"}, False),
    ],
    ids=str,
)
def test_only_where_nothing_but_appending_is_done(
    llama: Tiny, settings: dict[str, Any], some: bool
) -> None:
    talk = opened(llama.model, **{"recall": "off", "max_new_tokens": 20, **settings})
    with proposing(lambda tokens, n: [9] * n) as widths:
        metrics = talk.generate(3 * IDS, ignore_eos=True).metrics
    assert bool(widths) == some and (some or metrics.no_speculation)


def test_the_docs_have_the_table_of_what_runs_with_what() -> None:
    docs = Path(__file__).parents[1] / "docs" / "architecture.md"
    assert as_table() in docs.read_text(encoding="utf-8")


def test_what_a_pass_costs_is_measured() -> None:
    pace = Pace()
    usual = pace.costs()
    assert pace.factor == 1 and usual[0] == 1 and usual == sorted(usual)
    for width, seconds in ((1, 1.0), (8, 2.9), (1, 1.1), (4, 2.1), (1, 9.0), (2, 1.8)):
        pace.took(width, seconds)
    assert pace.factor == 2 and pace.costs()[3] == pytest.approx(2 * usual[3] - 1)
    for _ in range(9):
        pace.took(8, 1.01)
    assert pace.factor == 1 / 16
    for _ in range(9):
        pace.took(2, 50.0)
    assert pace.factor == 16


@pytest.mark.parametrize(("factor", "least", "most"), [(16.0, 1, 1), (2.0, 1, 7), (0.0, 8, 8)])
def test_as_many_are_proposed_as_pays(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch, factor: float, least: int, most: int
) -> None:
    """All if they cost nothing, none if they cost more than steps of their own."""
    monkeypatch.setattr(Pace, "factor", factor)
    cache, ids = llama.model.empty_cache(), [*IDS[:20], *IDS[:4]]
    policies = policies_of(llama.model, "full", 1000, 23)
    prefill(llama.model, cache, torch.tensor([ids[:-1]]), policies, reserve=40)
    made = Speculation(llama.model, cache, policies, None, [PromptLookup(ids[:-1])], ends=())
    made.enter(ids[-1], 100)
    assert least <= made.proposed + 1 <= most <= WIDEST
    assert made.steps == 1


def test_nothing_is_proposed_after_the_end(llama: Tiny) -> None:
    """Where what followed was the end of a message, nothing goes through behind that."""
    cache, ids = llama.model.empty_cache(), [5, 6, 7, 8, 2, 9, 10, 11, 5, 6]
    policies = policies_of(llama.model, "full", 1000, 9)
    prefill(llama.model, cache, torch.tensor([ids[:-1]]), policies, reserve=40)
    made = Speculation(llama.model, cache, policies, None, [PromptLookup(ids[:-1])], ends={2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "factor", 0.0)
        made.enter(ids[-1], 100)
    assert made.proposed == 2


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("begun", [2, 7, 11, 16, 23])
def test_an_answer_that_others_join_goes_on_the_same(llama: Tiny, begun: int) -> None:
    """In the middle of tokens that went through together, and of what they recalled."""
    base: dict[str, Any] = {"max_new_tokens": 40, "budget": "36", "recall_entries": 8}
    whole = opened(llama.model, speculate="off", **base).generate(IDS, ignore_eos=True).token_ids
    found = []
    for speculates in ("off", "auto"):
        talk = opened(llama.model, speculate=speculates, **base)
        other = opened(llama.model, speculate="off", **base)
        with proposing(partly([*IDS, *whole], random.Random(begun))):
            pieces = talk.stream_tokens(IDS, ignore_eos=True)
            said = [next(pieces).token_id for _ in range(begun)]
            others = other.stream_tokens(IDS[5:50], ignore_eos=True)
            next(others)
            together = StepsTogether()
            for _ in range(6):
                turns = [talk.context.turn, other.context.turn]
                together.take([turn for turn in turns if turn is not None])
                said.append(next(pieces).token_id)
                next(others)
            others.close()
            found.append(([*said, *(piece.token_id for piece in pieces)], state(talk)))
    assert found[0] == found[1]
