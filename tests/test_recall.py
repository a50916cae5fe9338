"""The recall store: turns read as if nothing had ever been dropped."""

import threading
from typing import Any

import pytest
import torch

import kvlite
from kvlite.cache import KVBits, LayerCache, Selection
from kvlite.cache.packed import Packed
from kvlite.cache.quantization.hadamard import rotation
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError, Stopped
from kvlite.methods import METHODS, parse_method
from kvlite.offload import HostKVStore, Recall
from kvlite.offload.kv.index import Index
from kvlite.offload.kv.placement import host_kv_bytes
from kvlite.offload.kv.store import HostKVLayer
from kvlite.offload.kv.swap import CANDIDATES, RECENT, SINKS
from tests.conftest import Tiny, make_tiny

from .oracles import recall as oracle
from .test_packed import random_ids

EXACT = [
    name
    for name in METHODS
    if parse_method(name).prefilling.exact and parse_method(name).compresses
]
LIMITS = {"count": 40, "candidates": 40 * CANDIDATES, "first": SINKS, "recent": RECENT}
COMPOSED = ["simlayerkv+kvx", "snapkv:per_head=true", "uncomp:delete=1", "kvx:layers=global"]


def chat(model: Any, **settings: Any) -> Conversation:
    given = {"recall": "ram", "budget": 40, "max_new_tokens": 9, "chunk": 64, **settings}
    return Conversation(model, Settings(**given))


def logits_of_the_whole(tiny: Tiny, ids: list[int]) -> torch.Tensor:
    """transformers' own, eagerly, after everything."""
    with torch.inference_mode():
        out: torch.Tensor = tiny.reference(torch.tensor([ids]), use_cache=False).logits[:, -1]
    return out


def last_logits(talk: Conversation, ids: list[int]) -> torch.Tensor:
    """After a turn is read; its answer is drawn too."""
    before = [*talk.token_ids, *talk.context.pending_ids]
    pieces = talk.stream_tokens(ids, ignore_eos=True)
    next(pieces)
    turn = talk.context.turn
    assert turn is not None
    logits = turn.logits.clone()
    assert talk.token_ids == before + ids
    for _ in pieces:
        pass
    return logits


@pytest.mark.cases(2, 16)
@pytest.mark.parametrize("name", [*EXACT, *COMPOSED])
@pytest.mark.parametrize("bits", ["16", "4"])
def test_each_turn_begins_as_if_nothing_had_been_dropped(llama: Tiny, name: str, bits: str) -> None:
    talk = chat(llama.model, method=name, kv_bits=bits)
    for turn in range(5):
        ids = random_ids(150 if turn == 0 else 30, turn)[0].tolist()
        logits = last_logits(talk, ids)
        upto = talk.token_ids[: len(talk.token_ids) - 8]
        torch.testing.assert_close(logits, logits_of_the_whole(llama, upto), atol=1e-4, rtol=1e-4)
        assert talk.cache.entries_mean < len(upto) or name in ("minicache", "chai", "simlayerkv")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name", ["gemma3", "mistral-sliding", "phi3-longrope", "llama-rope-dynamic", "llama4"]
)
def test_windows_are_read_again_where_an_answer_began(name: str) -> None:
    tiny = make_tiny(name)
    talk = chat(tiny.model, method="snapkv:window=8", budget=30)
    for turn in range(4):
        logits = last_logits(talk, random_ids(100 if turn == 0 else 20, turn)[0].tolist())
        upto = talk.token_ids[: len(talk.token_ids) - 8]
        torch.testing.assert_close(logits, logits_of_the_whole(tiny, upto), atol=1e-4, rtol=1e-4)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["snapkv", "h2o", "kvzip"])
def test_a_turn_that_is_stopped_leaves_everything_as_it_was(llama: Tiny, name: str) -> None:
    talk, straight = (chat(llama.model, method=name, budget=60) for _ in range(2))
    for each in (talk, straight):
        each.generate(random_ids(150)[0].tolist(), ignore_eos=True)
    cancel = threading.Event()

    def stop(done: int, of: int) -> None:
        if done > of / 2:
            cancel.set()

    with pytest.raises(Stopped):
        talk.read(random_ids(90, 5)[0].tolist(), callbacks=Callbacks(progress=stop, cancel=cancel))
    assert talk.store is not None and talk.store.seen == 150
    for seed in (1, 2):
        more = random_ids(40, seed)[0].tolist()
        answers = [each.generate(more, ignore_eos=True).token_ids for each in (talk, straight)]
        assert answers[0] == answers[1]


def test_a_tier_begins_when_something_is_about_to_be_dropped(llama: Tiny) -> None:
    talk = chat(llama.model, method="snapkv", budget=170)
    talk.generate(random_ids(150)[0].tolist(), ignore_eos=True)
    assert talk.store is None and talk.cache.entries_mean == 158
    ids = random_ids(60, 3)[0].tolist()
    logits = last_logits(talk, ids)
    assert talk.store is not None and talk.store.seen == 219
    upto = talk.token_ids[:219]
    torch.testing.assert_close(logits, logits_of_the_whole(llama, upto), atol=1e-4, rtol=1e-4)


def test_few_bits_are_rounded_once(llama: Tiny) -> None:
    """The codes of the first turn are those of the tenth."""
    talk, first = chat(llama.model, recall_bits="4"), None
    for turn in range(6):
        talk.generate(random_ids(200 if turn == 0 else 30, turn)[0].tolist(), ignore_eos=True)
        assert talk.store is not None
        segment = talk.store.layers[2].head_group.segment
        assert isinstance(segment, Packed)
        held = segment.keys.read(slice(0, 160))
        first = held.clone() if first is None else first
        assert held.equal(first)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["pyramidinfer", "uncomp:stage=true"])
def test_tokens_that_are_read_again_are_not_left_behind(llama: Tiny, name: str) -> None:
    """As many go on as if the answer had been part of what is read."""
    talk = chat(llama.model, method=name, budget=60, max_new_tokens=60)
    talk.generate(random_ids(200)[0].tolist(), ignore_eos=True)
    assert talk.store is not None
    before = [layer.read for layer in talk.store.layers]
    talk.generate(random_ids(20, 3)[0].tolist(), ignore_eos=True)
    more = [layer.read - was for layer, was in zip(talk.store.layers, before, strict=True)]
    assert more[0] == 80 and min(more) > 40


@pytest.mark.parametrize("name", ["h2o", "kvzip:layers=uniform"])
def test_a_method_does_not_go_on_from_what_another_found(llama: Tiny, name: str) -> None:
    talk = chat(llama.model, method="snapkv", budget=60)
    talk.read(random_ids(150)[0].tolist())
    talk.settings = talk.settings.replace({"method": name, "budget": 140})
    for seed, count in ((2, 40), (3, 30)):
        talk.read(random_ids(count, seed)[0].tolist())
    assert talk.store is not None
    (scored_by,) = {layer.scored_by for layer in talk.store.layers}
    assert talk.store.is_scored_by(scored_by)
    assert not talk.store.is_scored_by(f"another {scored_by}")
    for layer in talk.store.layers:
        assert layer.cached_scores is not None and layer.cached_scores.shape[2] == 220
        if name == "h2o":  # begins with the first turn that it reads
            assert 69 < float(layer.cached_scores.sum(-1)[0, 0]) < 71
        else:
            assert float(layer.cached_scores.min()) > 0


def test_what_was_judged_is_as_before_after_a_turn_that_was_stopped(llama: Tiny) -> None:
    talk = chat(llama.model, method="h2o", budget=60)
    talk.generate(random_ids(150)[0].tolist(), ignore_eos=True)
    cancel, store = threading.Event(), talk.store
    assert store is not None
    before = [
        layer.cached_scores.clone() for layer in store.layers if layer.cached_scores is not None
    ]

    def stop(done: int, of: int) -> None:
        if done > of / 2:
            cancel.set()

    with pytest.raises(Stopped):
        talk.read(random_ids(90, 5)[0].tolist(), callbacks=Callbacks(progress=stop, cancel=cancel))
    assert len(before) == 4
    for layer, was in zip(store.layers, before, strict=True):
        assert layer.cached_scores is not None and layer.cached_scores.equal(was)


@pytest.mark.parametrize(("bits", "most"), [("8", 0.02), ("4", 0.3)])
def test_a_tier_in_few_bits_is_nearly_exact_and_small(llama: Tiny, bits: str, most: float) -> None:
    talk, exact = (chat(llama.model, budget=40, recall_bits=each) for each in (bits, "16"))
    for turn in range(3):
        ids = random_ids(400 if turn == 0 else 30, turn)[0].tolist()
        logits = last_logits(talk, ids)
        upto = talk.token_ids[: len(talk.token_ids) - 8]
        whole = logits_of_the_whole(llama, upto)
        assert 0 < (logits - whole).std() < most * whole.std()
        exact.generate(ids, max_new_tokens=1)
    assert talk.store is not None and exact.store is not None
    assert talk.store.nbytes < (0.5 if bits == "8" else 0.35) * exact.store.nbytes


def test_a_tier_holds_what_was_read_and_no_more(llama: Tiny) -> None:
    talk = chat(llama.model, method="snapkv", budget=40)
    talk.read(random_ids(500)[0].tolist())
    shape = llama.model.shape
    entry = shape.kv_heads * (2 * 4 * shape.head_dim + 4)
    assert talk.store is not None and talk.store.nbytes == shape.layers * 500 * entry
    assert talk.store.nbytes == host_kv_bytes(shape, 500, 0, 4, None)
    answer = talk.generate([5, 6], ignore_eos=True)
    assert answer.metrics.host_kv_bytes == talk.store.nbytes <= shape.layers * 574 * entry
    assert " in RAM" in answer.metrics.line()


def test_recall_is_refused_where_it_cannot_be(llama: Tiny) -> None:
    with pytest.raises(SettingError, match="lminfinite masks attention to what it drops"):
        chat(llama.model, method="lminfinite").read([5] * 50)
    talk = chat(llama.model, recall="off")
    talk.read([5] * 90)
    (note,) = talk.generate([6], recall="ram").metrics.notes
    assert note.startswith("--recall ram cannot begin now")
    with pytest.raises(SettingError, match="--recall-limit 'lots' is not a size"):
        chat(llama.model, recall_limit="lots").read([5] * 90)
    full = chat(llama.model, method="full")
    full.read([5] * 90)
    assert full.store is None
    talk = chat(llama.model)
    talk.read([5] * 90)
    talk.generate([6], recall="off", max_new_tokens=1)
    assert talk.store is None


def test_that_recall_cannot_begin_is_said_once_a_conversation(llama: Tiny) -> None:
    for _ in range(2):
        said_once(chat(llama.model, recall="auto"))


def said_once(talk: Conversation) -> None:
    talk.generate(random_ids(90)[0].tolist(), recall="off")
    told: list[str] = []

    def notes(**settings: Any) -> tuple[str, ...]:
        told.clear()
        metrics = talk.generate(
            [5, 6], max_new_tokens=2, callbacks=Callbacks(notify=told.append), **settings
        ).metrics
        assert tuple(told) == metrics.notes
        return metrics.notes

    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Stopped):  # nothing was read, so it is said again
        talk.generate([5, 6], callbacks=Callbacks(cancel=cancel))
    (note,) = notes()
    assert note.startswith("--recall auto cannot begin now")
    assert notes() == notes() == ()
    (note,) = notes(recall="ram")  # what is asked for anew is answered
    assert note.startswith("--recall ram cannot begin now")
    assert notes(recall="ram") == notes() == ()


def test_too_little_memory_for_a_tier_is_said_and_the_conversation_goes_on(llama: Tiny) -> None:
    talk = chat(llama.model, recall_limit="300KiB", kv_bits="16")
    first = talk.generate(random_ids(200)[0].tolist(), ignore_eos=True)
    assert first.metrics.host_kv_bytes > 0 and not first.metrics.notes
    second = talk.generate(random_ids(200, 2)[0].tolist(), ignore_eos=True)
    (note,) = second.metrics.notes
    assert note.startswith("recall would take 4") and "may take 300.0 KiB" in note
    assert second.metrics.host_kv_bytes == 0 and talk.store is None
    (note,) = talk.generate([5, 6], ignore_eos=True).metrics.notes
    assert note.startswith("--recall ram cannot begin now")


@pytest.mark.parametrize("bits", ["8", "4"])
def test_a_quantized_tier_takes_what_was_predicted(llama: Tiny, bits: str) -> None:
    talk = chat(llama.model, recall_bits=bits)
    talk.read(random_ids(500)[0].tolist())
    predicted = host_kv_bytes(llama.model.shape, 500, 0, 4, KVBits(int(bits), int(bits)))
    assert talk.store is not None and talk.store.nbytes == predicted


# --- every step -----------------------------------------------------------------------------------


def full_head_group(entries: int, heads: int = 3, dim: int = 64, seed: int = 0) -> LayerCache:
    generator = torch.Generator().manual_seed(seed)
    layer = LayerCache(
        [(tuple(range(heads)), entries)],
        batch=1,
        dim=dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    keys, values = (torch.randn(1, heads, entries, dim, generator=generator) for _ in range(2))
    layer.head_groups[0].append(keys, values, torch.arange(entries, dtype=torch.int32))
    return layer


@pytest.fixture(params=["compiled", "torch"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to recall on a CPU."""
    if request.param == "compiled":
        pytest.importorskip("numba")
        return
    for module in ("recall", "index"):
        monkeypatch.setattr(f"kvlite.offload.kv.{module}.has_compiled", lambda device: False)


@pytest.mark.parametrize("rounded", ["neither", "held", "kept", "both"])
@pytest.mark.parametrize("heads", [(0, 1, 2), (2,), (0, 2)])
def test_a_token_brings_back_what_the_oracle_says(
    ways: None, rounded: str, heads: tuple[int, ...]
) -> None:
    everything = full_head_group(300)
    random = torch.Generator().manual_seed(5)
    at = torch.stack([torch.randperm(300, generator=random)[:60].sort().values for _ in heads])
    chosen = Selection(everything.head_groups[0], at[None], heads)
    bits = KVBits(8, 8) if rounded in ("held", "both") else None
    cache = LayerCache.gathered([chosen], [60], bits=bits)
    head_group = cache.head_groups[0]
    assert (head_group.segment is None) == (bits is None)
    if rounded in ("kept", "both"):
        everything = everything.resized([300], bits=KVBits(8, 8))
    source = everything.head_groups[0]
    queries = torch.randn(1, len(heads), 4, 64, generator=random)
    rough = torch.rand(1, 3, 300, generator=random)
    store = HostKVStore([HostKVLayer(everything, None, 300)], None, seen=300)
    Recall(store, 40 - SINKS - RECENT).bring_back(0, head_group, queries, rough.clone())
    before = [set(line.tolist()) for line in at]
    numbers = (each[0].double().numpy() for each in (queries, source.keys, rough))
    expected = oracle.lines_after(before, heads, *numbers, **LIMITS)
    for row, head in enumerate(heads):
        assert (
            set(head_group.positions[0, row].tolist()) == expected[row] and len(expected[row]) == 60
        )
        places = head_group.positions[0, row].long()
        close = 0 if rounded == "neither" else 0.05
        for mine, theirs in ((head_group.keys, source.keys), (head_group.values, source.values)):
            torch.testing.assert_close(mine[0, row], theirs[0, head, places], atol=close, rtol=0)


def test_channels_that_never_vary_and_numbers_that_are_none_do_no_harm(ways: None) -> None:
    everything = full_head_group(300)
    everything.head_groups[0].residual_keys[..., 7] = 0.5
    queries = torch.randn(1, 3, 4, 64) * 3
    index = Index.of(everything.head_groups[0].keys, queries.square().sum(2), 0)
    scores = index.scores(queries, 300)
    assert bool(scores.isfinite().all()) and abs(float(scores.sum()) - 3) < 1e-3
    scores[:, :, 50:] = torch.nan
    at = torch.arange(0, 180, 3).expand(1, 3, -1)
    cache = LayerCache.gathered([Selection(everything.head_groups[0], at)], [60])
    store = HostKVStore([HostKVLayer(everything, None, 300)], None, seen=300)
    Recall(store, 30).bring_back(0, cache.head_groups[0], queries, scores)
    line = cache.head_groups[0].positions.sort(-1).values
    assert bool((line[..., 1:] > line[..., :-1]).all()) and int(line.min()) >= 0
    assert int(line.max()) == 299


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("rows", "dim"), [(3, 16), (4, 64), (9, 96), (5, 128)])
def test_the_index_expects_what_signs_say(
    compiled: bool, rows: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("kvlite.offload.kv.index.has_compiled", lambda device: False)
    keys = torch.randn(1, 2, 90, dim) * 3 + 1
    queries = torch.randn(1, 2, rows, dim) / dim**0.5
    index = Index.of(keys[:, :, :50], queries.square().sum(2), 30)
    index.add(keys[:, :, 50:70])
    index = index.extended(60, keys[:, :, 60:], 5)
    found = index.scores(queries, 93)
    assert index.used == 90 and found.shape == (1, 2, 93)
    assert found[..., 90:].abs().max() == 0
    for head in range(2):
        centered = keys[0, head] - keys[0, head, :50].mean(0)
        turned = (centered * index.balance[0, head]) @ rotation(dim, keys.device)
        signs = turned.sign() * turned.abs().mean(-1, keepdim=True)
        asked = (queries[0, head] / index.balance[0, head]) @ rotation(dim, keys.device)
        if compiled:  # products with ones are those of queries in 16 steps
            low, high = asked.aminmax(dim=-1, keepdim=True)
            steps = ((asked - low) / (high - low) * 15).round() / 15 * (high - low) + low
            ones = (signs > 0).float()
            logits = (2 * steps @ ones.T - asked.sum(-1, keepdim=True)) * signs[:, 0].abs()
        else:
            logits = asked @ signs.T
        expected = logits.softmax(-1).mean(0)
        close = 0.01 if compiled else 1e-3
        torch.testing.assert_close(found[0, head, :90], expected, rtol=close, atol=1e-6)


@pytest.mark.long
def test_recall_brings_answers_nearer_to_those_of_the_whole(
    smollm: kvlite.Runner, prose: list[int]
) -> None:
    """With an eighth of the entries held, a fifth of the distance is left at most."""

    def said(entries: int, **given: Any) -> list[torch.Tensor]:
        talk = chat(smollm.model, **given)
        next(talk.stream_tokens(prose[:800], max_new_tokens=40))
        return [step(talk, token, entries).log_softmax(-1) for token in prose[800:824]]

    whole = torch.stack(said(0, method="full"))
    recalled, cut = (
        float((whole.exp() * (whole - torch.stack(said(entries, budget=100)))).sum())
        for entries in (100, 0)
    )
    assert recalled < 0.2 * cut


def step(talk: Conversation, token: int, entries: int) -> torch.Tensor:
    """Logits after a token of an answer."""
    assert talk.context.turn is not None
    recall = None if talk.store is None else Recall(talk.store, entries)
    return decode_step(
        talk.model, talk.cache, torch.tensor([token]), talk.context.turn.policies, recall
    )
