"""Models with recurrent layers: states are carried, copied and returned to, never cut or shared."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlite
from kvlite.cache import KVCache
from kvlite.cache.recurrent import RecurrentState, States
from kvlite.cache.snapshot import LayerWriter
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prefill import prefill
from kvlite.errors import SettingError, SnapshotError, Stopped
from kvlite.methods import parse_method
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.recurrent_states import require_states
from tests.conftest import HYBRIDS, Tiny, make_tiny
from tests.contract.talks import FIRST, OTHER, SECOND, heard, opened, said
from tests.test_oom_policy import survives, undisturbed
from tests.test_recall import EXACT, last_logits, logits_of_the_whole

IDS = [3 + 7 * i % 190 for i in range(150)]


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> Tiny:
    return make_tiny(request.param)


def read(tiny: Tiny, ids: list[int], cache: KVCache | None = None, **given: Any) -> KVCache:
    cache = cache or tiny.model.empty_cache()
    policies = layer_policies(Full(), tiny.model.shape, 10**6, cache.seen + len(ids))
    prefill(tiny.model, cache, torch.tensor([ids]), policies, **given)
    return cache


def states(cache: KVCache) -> list[Tensor]:
    """In the order of the model's layers."""
    return [
        each
        for _, own in sorted(cache.states.items())
        for _, state in sorted(own.items())
        for each in state.tensors
    ]


def states_of_transformers(tiny: Tiny, ids: list[int]) -> list[Tensor]:
    """What its own cache keeps after `ids`."""
    with torch.no_grad():
        past = tiny.reference(torch.tensor([ids]), use_cache=True).past_key_values
    kept = [layer for layer in past.layers if getattr(layer, "conv_states", None)]
    parts = [(layer.conv_states[0], layer.recurrent_states[0]) for layer in kept]
    return [each for part in parts for each in part if each is not None]


@pytest.mark.cases(2, 12)
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_states_are_those_of_transformers_whatever_the_chunk(hybrid: Tiny, chunk: int) -> None:
    cache = read(hybrid, IDS, chunk=chunk)
    theirs = states_of_transformers(hybrid, IDS)
    assert len(theirs) == len(states(cache)) > 0
    for one, other in zip(states(cache), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    shape = hybrid.model.shape
    assert cache.state_bytes == shape.state_bytes(4) == sum(each.nbytes for each in theirs)
    assert shape.layers + shape.recurrent_layers <= hybrid.reference.config.num_hidden_layers


@pytest.mark.cases(1, 10)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("bits", ["16", "4"])
def test_every_turn_that_recalls_begins_as_if_nothing_had_been_dropped(
    hybrid: Tiny, name: str, bits: str
) -> None:
    """The answer is read again from the states before it."""
    settings = {"method": name, "budget": "48", "recall": "ram", "kv_bits": bits}
    talk = Conversation(hybrid.model, Settings(max_new_tokens=9, chunk=64).replace(settings))
    for turn in range(2):
        logits = last_logits(talk, IDS[70 * turn : 70 * turn + 70])
        ids = talk.token_ids[: len(talk.token_ids) - 8]
        assert (logits - logits_of_the_whole(hybrid, ids)).abs().max() < 1e-4
        assert talk.store is not None and talk.store.seen == len(ids)


def test_tokens_are_not_left_behind_between_layers(hybrid: Tiny) -> None:
    with pytest.raises(SettingError, match="recurrent layers do not allow: choose another"):
        layer_policies(parse_method("pyramidinfer"), hybrid.model.shape, 40, 100)


@pytest.mark.cases(2)
def test_without_the_state_it_is_read_again_and_said(hybrid: Tiny) -> None:
    talk = opened(hybrid, method="full", checkpoint_limit="0MB")
    said(talk, FIRST, SECOND)
    told: list[str] = []
    edited = heard(talk.edit(2, OTHER, callbacks=Callbacks(notify=told.append)))
    assert [note for note in told if "tokens are read again" in note]
    fresh = opened(hybrid, method="full")
    assert said(fresh, FIRST, OTHER)[1] == edited


@pytest.mark.cases(2)
def test_reading_that_is_stopped_leaves_the_states(hybrid: Tiny) -> None:
    cache, stop = read(hybrid, IDS[:40]), Event()
    before = [each.clone() for each in states(cache)]

    def progress(done: int, of: int) -> None:
        if 2 * done > of:
            stop.set()

    with pytest.raises(Stopped):
        read(hybrid, IDS, cache, chunk=16, callbacks=Callbacks(progress=progress, cancel=stop))
    assert all(one.equal(other) for one, other in zip(states(cache), before, strict=True))
    read(hybrid, IDS[40:], cache)
    theirs = states_of_transformers(hybrid, IDS)
    for one, other in zip(states(cache), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("name", ["full", "recall in 4 bits"])
def test_where_memory_runs_out_states_are_right(hybrid: Tiny, name: str) -> None:
    """Chunks and steps are run again from the states before them."""
    straight = undisturbed(hybrid.model, [name])
    sites = straight[name].sites
    carried = [at for at, site in enumerate(sites) if "recurrent" in str(site)]
    assert carried
    for at in [*carried[:: len(carried) // 5], *range(5, len(sites), len(sites) // 4)]:
        survives(hybrid.model, name, straight[name], range(at, at + 1))


@pytest.mark.cases(4, 8)
@pytest.mark.parametrize("change", ["missing", "misplaced", "another size", "another type"])
def test_damaged_states_are_refused(hybrid: Tiny, change: str) -> None:
    cache = read(hybrid, IDS)
    require_states(cache.states, hybrid.model.shape, torch.float32)
    require_states({}, hybrid.model.shape, torch.float32)
    index, own = next(iter(cache.states.items()))
    place, state = next(iter(own.items()))
    assert state.conv is not None
    others = {at: each for at, each in own.items() if at != place}
    changed = {
        "missing": others,
        "misplaced": {**others, place + 7: state},
        "another size": {**own, place: RecurrentState(state.conv[..., :-1], state.recurrent)},
        "another type": {**own, place: RecurrentState(state.conv.half(), state.recurrent)},
    }[change]
    with pytest.raises(SnapshotError):
        require_states({**cache.states, index: changed}, hybrid.model.shape, torch.float32)


@pytest.mark.cases(1)
@pytest.mark.parametrize("store", [False, True])
def test_a_file_without_some_of_the_states_is_refused(
    hybrid: Tiny, store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LayerWriter.states

    def some(self: LayerWriter, states: dict[int, States]) -> dict[str, Any]:
        left_out = (self.prefix == "tier") == store
        return write(self, {0: states[0]} if left_out else states)

    talk = opened(hybrid, budget="40")
    said(talk, FIRST)
    monkeypatch.setattr(LayerWriter, "states", some)
    talk.save(tmp_path / "talk.kv")
    with pytest.raises(SnapshotError, match="damaged"):
        kvlite.Runner(hybrid.model, Settings()).open(tmp_path / "talk.kv", reading=Callbacks())


def test_metrics_say_how_many_layers_keep_what() -> None:
    tiny = make_tiny("qwen3-next")
    shape = tiny.model.shape
    metrics = opened(tiny, method="snapkv", budget="40").generate(IDS).metrics
    assert (metrics.layers, metrics.recurrent_layers) == (4, shape.recurrent_layers)
    assert metrics.state_bytes == shape.state_bytes(4)
    assert f"in 4 of {4 + shape.recurrent_layers} layers, states" in metrics.line()
