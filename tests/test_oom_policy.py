"""Memory runs out anywhere: every answer is finished, and by what costs nothing it is the same."""

import gc
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvlite.cache import segment
from kvlite.cache.recurrent import state_tensors
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prefill import Prefill
from kvlite.engine.prefill_oom import prefill_oom_actions
from kvlite.errors import OutOfMemory
from kvlite.memory.oom import BUDGET, CHUNK, EIGHT_BITS, FOUR_BITS, HIDDEN, OOM_STEPS, OOMPolicy
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.load import LoadedModel
from tests.conftest import make_tiny

from .faults import Faults, Site
from .test_packed import random_ids

LOSSY = {oom_step.name for oom_step in OOM_STEPS if oom_step.lossy}
DEFAULT = Settings().method
LEAST_RUNS = 24

# One of each way that memory is taken in: cuts, rows, codes, states that are settled late, merged
# layers, repetitions, masks, and what is kept to be recalled.
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "heads compete, in 4 bits": {
        "method": "snapkv:window=8,per_head=true",
        "kv_bits": 4,
        "budget": 60,
    },
    "simlayerkv, first step": {"method": "simlayerkv:threshold=0.2,recent=20,detect=decode"},
    "minicache": {"method": "minicache:start=0"},
    "kvzip": {"method": "kvzip"},
    "shared layers": {"method": "snapkv:window=8,layers=global"},
    "lambda mask": {"method": "lminfinite", "chunk": 16},
    "tokens left behind": {"method": "pyramidinfer"},
    "recall": {"method": DEFAULT, "recall": "ram", "recall_entries": 8},
    "recall, h2o in 4 bits": {
        "method": "h2o",
        "kv_bits": 4,
        "budget": 60,
        "recall": "ram",
        "recall_entries": 8,
    },
    "recall in 4 bits": {"method": "tova", "recall": "ram", "recall_bits": "4"},
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_tiny("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48).model


def conversation(model: LoadedModel, **settings: Any) -> Conversation:
    given = {"recall": "off", "budget": 40, "chunk": 40, "max_new_tokens": 3, **settings}
    return Conversation(model, Settings(**given))


TURNS = [random_ids(70)[0].tolist(), random_ids(12, 1)[0].tolist()]
LONGEST = 3, 2


def said(talk: Conversation) -> list[list[int]]:
    """Two turns."""
    turns = zip(TURNS, LONGEST, strict=True)
    answers = [
        talk.generate(ids, max_new_tokens=longest, ignore_eos=True) for ids, longest in turns
    ]
    assert [each.finish_reason for each in answers] == ["length"] * 2
    return [each.token_ids for each in answers]


def contents(talk: Conversation) -> list[torch.Tensor]:
    """All that is held, ascending in position: positions, keys, values, remembered attention; and
    the states of recurrent layers."""
    held = state_tensors(talk.cache.states)
    for head_group in (
        head_group for layer in talk.cache.layers for head_group in layer.head_groups
    ):
        positions, order = head_group.positions[:, :, : head_group.used].sort(dim=-1)
        along = order[..., None].expand(-1, -1, -1, head_group.residual_keys.shape[3])
        held += [positions, head_group.keys.gather(2, along), head_group.values.gather(2, along)]
        if head_group.rows is not None:
            held.append(head_group.scores().gather(2, order))
    return held


@dataclass(frozen=True)
class Straight:
    """A conversation that nothing disturbed.

    Attributes:
        held: contents of its cache.
        sites: of its allocations, in order.
        firsts: which of them are the first at a place where no case before had any.
    """

    said: list[list[int]]
    held: list[torch.Tensor]
    nbytes: int
    sites: list[Site]
    firsts: list[int]


@pytest.fixture(scope="module")
def straight(model: LoadedModel) -> dict[str, Straight]:
    return undisturbed(model, CASES)


def undisturbed(model: LoadedModel, cases: Iterable[str]) -> dict[str, Straight]:
    made: dict[str, Straight] = {}
    known: set[Site] = set()
    for name in cases:
        settings = CASES[name]
        first = said(conversation(model, **settings))  # compiles, and fills what is made once
        talk = conversation(model, **settings)
        with Faults(traces=True) as faults:
            assert said(talk) == first
        places = [site[:3] for site in faults.sites]
        firsts = [at for at, place in enumerate(places) if place not in {*places[:at], *known}]
        known |= set(places)
        made[name] = Straight(first, contents(talk), talk.cache.nbytes, faults.sites, firsts)
    gc.freeze()  # what was loaded meanwhile is a million objects, too
    return made


def survives(model: LoadedModel, name: str, straight: Straight, at: range) -> list[str]:
    """Two turns with some allocations that fail: they are finished, the same if nothing was given
    up that costs quality, and nothing stays behind. What was given up."""
    talk, faults = conversation(model, **CASES[name]), Faults(at)
    where = f"{name}, allocation {at.start}, {straight.sites[at.start]}"
    with faults:
        for ids, longest in zip(TURNS, LONGEST, strict=True):
            given: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": longest}
            try:
                answer = talk.generate(ids, **given)
            except OutOfMemory:  # nothing helps where a first turn begins
                assert not talk.token_ids and not talk.cache.entries_mean, where
                answer = talk.generate(ids, **given)
            assert answer.finish_reason == "length", where
    assert faults.failed == len(at), where
    heard = talk.token_ids + talk.context.pending_ids
    taken = talk.context.oom_policy.taken
    if not LOSSY & {*taken}:
        whole = [
            token
            for pair in zip(TURNS, straight.said, strict=True)
            for each in pair
            for token in each
        ]
        assert heard == whole, where
        assert talk.cache.nbytes == straight.nbytes, where
    if not taken:
        both = zip(contents(talk), straight.held, strict=True)
        assert all(mine.equal(theirs) for mine, theirs in both), where
    del talk, answer
    gc.collect()
    assert faults.live == 0, where
    return taken


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_wherever_memory_runs_out_the_answer_goes_on(
    model: LoadedModel, straight: dict[str, Straight], name: str
) -> None:
    """Once, and nothing is given up; again and again; at any time, and for as long."""
    known, draw = straight[name], random.Random(name)
    for at in known.firsts:
        assert survives(model, name, known, range(at, at + 1)) == []
    for at in known.firsts[::5]:
        survives(model, name, known, range(at, at + 3))
    for _ in range(LEAST_RUNS - len(known.firsts)):
        at = draw.randrange(len(known.sites) - 5)
        survives(model, name, known, range(at, at + draw.choice([1, 1, 1, 2, 3])))


def run_dry(talk: Conversation, at: int) -> tuple[list[int], str]:
    """A first turn in which memory runs out at one allocation, and all that follow fail too; what
    was answered, and what the user was told."""
    told: list[str] = []
    with Faults(range(at, 10**6)):
        try:
            answer = talk.generate(
                TURNS[0], ignore_eos=True, callbacks=Callbacks(notify=told.append)
            )
        except OutOfMemory as error:
            return [], str(error)
    assert answer.finish_reason == answer.metrics.finish_reason == "memory"
    assert told[-1] == answer.metrics.notes[-1]
    assert "ended for lack of memory" in answer.metrics.line()
    return answer.token_ids, told[-1]


@pytest.mark.cases(1, 6)
@pytest.mark.parametrize("name", CASES)
def test_where_nothing_may_be_given_up_the_conversation_is_kept(
    model: LoadedModel, straight: dict[str, Straight], name: str
) -> None:
    """A step that broke off is gone on with; a turn that did can be read again."""
    known, broken_off = straight[name], 0
    single = conversation(model, **CASES[name])
    with Faults() as faults:
        single.generate(TURNS[0], ignore_eos=True)
    for at in range(5, faults.count, faults.count // 9):
        talk = conversation(model, never_lossy=True, **CASES[name])
        heard, sentence = run_dry(talk, at)
        assert "--never-lossy" in sentence and "can go on" in sentence
        assert not LOSSY & {*talk.context.oom_policy.taken}
        assert heard == known.said[0][: len(heard)]
        if not heard and talk.token_ids:
            assert talk.token_ids == [*TURNS[0]]  # read, and memory ran out at the first draw
            continue
        if not heard:
            assert (talk.token_ids, talk.cache.seen, talk.cache.nbytes) == ([], 0, 0)
            assert talk.generate(TURNS[0], ignore_eos=True).token_ids == known.said[0]
            continue
        broken_off += 1
        assert talk.context.turn is not None
        talk.context.turn.finish_step()
        assert talk.token_ids + talk.context.pending_ids == TURNS[0] + heard
        assert talk.cache.seen == len(talk.token_ids)
        if not talk.context.pending_ids:
            after = [*heard, int(talk.context.turn.logits.argmax())]
            assert after[: len(known.said[0])] == known.said[0][: len(after)]
        assert talk.generate(TURNS[1], ignore_eos=True).finish_reason == "length"
    assert broken_off


def test_a_step_that_broke_off_ends_before_anything_else_is_read(model: LoadedModel) -> None:
    """Or is not needed, where the next turn reads from the host store."""
    for settings in ({"method": "full"}, CASES["recall"]):
        for _ in range(2):  # the first allocates what is allocated once
            with Faults() as faults:
                talk = conversation(model, **settings)
                talk.generate(TURNS[0], max_new_tokens=2, ignore_eos=True)
        talk, whole = (conversation(model, never_lossy=True, **settings) for _ in range(2))
        heard, _ = run_dry(talk, faults.count - 4)
        assert len(heard) == 1 and talk.context.pending_ids == heard
        answer = talk.generate(TURNS[1], max_new_tokens=2, ignore_eos=True)
        whole.generate(TURNS[0], max_new_tokens=1, ignore_eos=True)
        assert answer.token_ids == whole.generate(TURNS[1], max_new_tokens=2).token_ids
        assert talk.token_ids == whole.token_ids


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("settings", "share", "fallbacks"),
    [
        ({"method": "h2o", "budget": 300, "chunk": 256}, 0.6, {CHUNK}),
        ({"method": DEFAULT, "budget": 400}, 0.9, {CHUNK, EIGHT_BITS}),
        ({"method": DEFAULT, "budget": 400}, 0.8, {CHUNK, EIGHT_BITS, FOUR_BITS}),
    ],
)
def test_another_process_takes_memory_while_a_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], share: float, fallbacks: set[str]
) -> None:
    """What may live shrinks to a share of what was needed; what is given up makes up for it."""
    # A model so small would else be worked on in one piece, and that would be what does not fit.
    monkeypatch.setattr(segment, "ELEMENTS_AT_ONCE", 1 << 12)
    model = make_tiny("llama", num_hidden_layers=8, hidden_size=32, intermediate_size=48).model
    given, ids = {"chunk": 64, "max_new_tokens": 8, **settings}, random_ids(900)[0].tolist()
    talk, straight = (conversation(model, **given) for _ in range(2))
    with Faults() as free:
        whole = straight.generate(ids, ignore_eos=True)
    faults, told = Faults(), []

    def taken_by_others(done: int, of: int) -> None:
        if done > 0.8 * of:
            faults.cap = int(share * free.peak)

    with faults:
        answer = talk.generate(
            ids, ignore_eos=True, callbacks=Callbacks(progress=taken_by_others, notify=told.append)
        )
    assert faults.failed and faults.live <= share * free.peak
    assert {*answer.metrics.fallbacks} == fallbacks
    assert all(any(name in note for note in told) for name in fallbacks)
    assert f"memory was short: {answer.metrics.fallbacks[0]}" in answer.metrics.line()
    assert LOSSY & fallbacks or answer.token_ids == whole.token_ids
    assert (answer.kv_bytes < 0.6 * whole.kv_bytes) == bool(LOSSY & fallbacks)


def test_what_was_given_up_stays_so_for_later_turns(model: LoadedModel) -> None:
    talk = conversation(model, method=DEFAULT, budget=70)
    talk.context.oom_policy.taken = [CHUNK, EIGHT_BITS, FOUR_BITS, BUDGET]
    answer = talk.generate(TURNS[0], ignore_eos=True)
    assert (answer.metrics.kv_bits, answer.metrics.budget, answer.metrics.fallbacks) == (
        "4",
        35,
        (),
    )
    bare = conversation(model, method=DEFAULT, budget=35, kv_bits=4, chunk=20)
    assert bare.generate(TURNS[0], ignore_eos=True).token_ids == answer.token_ids
    assert bare.cache.nbytes == talk.cache.nbytes


@pytest.mark.parametrize("chunk", [5, 16, 17, 24, 40, 100, 777, 1024, 4095])
def test_chunks_are_never_shorter_than_16_tokens(model: LoadedModel, chunk: int) -> None:
    """Unless they were asked for so; in this turn, and in later ones."""
    reading = Prefill(
        model,
        model.empty_cache(),
        torch.tensor([[5] * 5000]),
        layer_policies(parse_method("full"), model.shape, 5000, 5000),
        chunk=chunk,
    )
    shorter, sizes = prefill_oom_actions(reading)[CHUNK], [chunk]
    while shorter():
        sizes.append(reading.chunk)
    assert sizes[-1] == min(chunk, 16) and all(type(size) is int for size in sizes)
    assert all(a > b >= max(16, a // 2) for a, b in pairwise(sizes))
    talk = conversation(model, method="full", chunk=chunk)
    for times in range(15):
        talk.context.oom_policy.taken = [CHUNK] * times
        talk.read([5])
        assert talk.context.turn is not None
        assert talk.context.turn.chunk == sizes[min(times, len(sizes) - 1)]


def test_hidden_states_may_wait_in_host_memory(model: LoadedModel) -> None:
    talk, usual = (conversation(model, method=DEFAULT) for _ in range(2))
    talk.context.oom_policy.taken = [HIDDEN]
    assert said(talk) == said(usual)


def test_a_layer_is_not_begun_in_chunks_for_which_there_is_no_memory() -> None:
    oom_policy, chunks, told = OOMPolicy(torch.device("cpu")), [64], []
    oom_policy.free, oom_policy.tell = lambda device: 1000, told.append

    def halve() -> bool:
        chunks.append(chunks[-1] // 2)
        return True

    oom_policy.reserve_for(900, lambda: 10 * chunks[-1], {CHUNK: halve})
    assert chunks == [64, 32, 16, 8] and oom_policy.times(CHUNK) == len(told) == 3
    oom_policy.reserve_for(1100, lambda: 10, {CHUNK: halve})  # in vain
    oom_policy.reserve_for(100, lambda: 1000, {EIGHT_BITS: halve})  # never for a forecast
    assert oom_policy.times(CHUNK) == len(told) == 3


def test_what_is_no_lack_of_memory_is_not_survived() -> None:
    oom_policy, tries = OOMPolicy(torch.device("cpu")), []

    def work() -> None:
        tries.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        oom_policy.run(work, {CHUNK: lambda: True})
    assert len(tries) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
def test_every_kind_of_it_is(error: Exception) -> None:
    oom_policy, errors, given = OOMPolicy(torch.device("cpu")), [error, error], []
    done = oom_policy.run(lambda: _raised(errors), {CHUNK: lambda: not given.append(1)})
    assert done == "done" and given == [1] and oom_policy.taken == [CHUNK]


def _raised(errors: list[Exception]) -> str:
    if errors:
        raise errors.pop()
    return "done"


def test_what_cannot_be_given_up_for_lack_of_memory_is_passed_over() -> None:
    oom_policy, errors = OOMPolicy(torch.device("cpu")), [MemoryError()] * 2

    def no_room() -> bool:
        raise torch.OutOfMemoryError

    oom_actions = {CHUNK: no_room, EIGHT_BITS: lambda: False, BUDGET: lambda: True}
    assert oom_policy.run(lambda: _raised(errors), oom_actions) == "done"
    assert oom_policy.taken == [BUDGET]
