"""Questions that are answered together get the answers that each would get alone."""

import os
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import pytest
import torch

import kvlite
from kvlite import Callbacks, Conversation, KvliteError, Runner
from kvlite.conversation import run_stats, together
from kvlite.conversation.context import Context
from kvlite.conversation.together import ask_all
from kvlite.engine import compiled_rows
from kvlite.engine.layer_prefill import LayerPrefill
from kvlite.engine.layer_step import LayerStep
from kvlite.offload import HostKVStore
from kvlite.offload.kv.copies import StoreCopies
from tests.cli.conftest import model_of

DOCUMENT = "The cat sat on the mat and the dog lay by the door. " * 20
QUESTIONS = ["Who sat?", "Who lay by the door, and on what did the cat sit?", "Where?", "Why not?"]
TEXTS = [f"{DOCUMENT.strip()}\n\n{question}" for question in QUESTIONS]

WAYS: list[dict[str, Any]] = [
    {"method": "snapkv:window=8", "budget": "64"},
    {"method": "full"},
    {"method": "snapkv:window=8", "budget": "64", "recall": "off"},
    {"method": "h2o", "budget": "64"},
    {"method": "spans", "budget": "80", "kv_bits": "4", "recall_bits": "8"},
    {"method": "spans", "budget": "80", "temperature": 1.0, "seed": 3},
    {"method": "full", "speculate": "auto"},
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return kvlite.load(str(model_of(tmp_path_factory.mktemp("tiny"), 640)), max_new_tokens=8)


def begun(runner: Runner, **settings: Any) -> Conversation:
    """A conversation that read the document, if it can be read ahead of a question."""
    talk = runner.conversation(**settings)
    talk.read_ahead(DOCUMENT.strip())
    return talk


def alone(runner: Runner, text: str, **settings: Any) -> list[int | None]:
    return [piece.token_id for piece in begun(runner, **settings).stream(text)]


class Heard:
    """The answers of `ask_each`, by question."""

    def __init__(self, pieces: Iterator[tuple[int, Any]], count: int) -> None:
        self.tokens: list[list[int | None]] = [[] for _ in range(count)]
        self.last: list[Any] = [None] * count
        for index, piece in pieces:
            if not isinstance(piece, KvliteError):
                self.tokens[index].append(piece.token_id)
            self.last[index] = piece

    @property
    def metrics(self) -> list[kvlite.GenerationMetrics]:
        return [piece.metrics for piece in self.last]


def heard(talk: Conversation, texts: Sequence[str] = TEXTS, **given: Any) -> Heard:
    return Heard(talk.ask_each(texts, **given), len(texts))


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_each_answer_is_that_of_its_question_alone(runner: Runner, way: dict[str, Any]) -> None:
    talk = begun(runner, **way)
    before = [*talk.token_ids]
    made = heard(talk)
    assert made.tokens == [alone(runner, text, **way) for text in TEXTS]
    assert [metrics.together for metrics in made.metrics] == [4] * 4
    if before:
        assert all(metrics.prompt_tokens < 40 for metrics in made.metrics)  # it was read once
    assert talk.token_ids == before and not talk.messages
    assert [piece.token_id for piece in talk.stream(TEXTS[2])] == made.tokens[2]


@pytest.mark.cases(1)
@pytest.mark.parametrize("recall", ["auto", "off"])
def test_recurrent_layers_have_states_for_each_answer(recall: str, tmp_path: Any) -> None:
    folder = str(model_of(tmp_path, 640, "qwen3-next"))
    runner = kvlite.load(folder, max_new_tokens=8, budget="64", method="snapkv", recall=recall)
    made = heard(begun(runner))
    assert made.tokens == [alone(runner, text) for text in TEXTS]
    assert [metrics.together for metrics in made.metrics] == [4] * 4


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("way", "why"), [({"vram": "900MB"}, "--vram 900MB"), ({"recall": "disk"}, "is on disk")]
)
def test_one_after_another_with_the_reason(way: dict[str, Any], why: str, tmp_path: Any) -> None:
    runner = kvlite.load(str(model_of(tmp_path, 640)), max_new_tokens=4, budget="64", **way)
    talk, notes = begun(runner), list[str]()
    made = heard(talk, callbacks=Callbacks(notify=notes.append))
    assert [note for note in notes if why in note]
    assert made.tokens == [alone(runner, text) for text in TEXTS]
    assert [metrics.together for metrics in made.metrics] == [1] * 4 and not talk.messages


def test_as_many_as_fit(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = heard(begun(runner, budget="64")).tokens
    fits = together.AnswerBatch._has_room
    monkeypatch.setattr(
        together.AnswerBatch, "_has_room", lambda self: fits(self) and len(self.going) < 2
    )
    made = heard(begun(runner, budget="64"))
    assert made.tokens == expected
    assert [metrics.together for metrics in made.metrics] == [2] * 4


def test_tokens_come_while_a_long_question_is_read(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every chunk, if each is a slice."""
    texts = [TEXTS[0], f"{TEXTS[1]} {'And who sat by the door? ' * 20}"]
    expected = heard(begun(runner, budget="64", chunk=32), texts).tokens
    events, take = list[str](), LayerPrefill.take

    def chunk(self: LayerPrefill, *args: Any, **given: Any) -> torch.Tensor:
        events.append("chunk")
        return take(self, *args, **given)

    talk = begun(runner, budget="64", chunk=32)
    monkeypatch.setattr(LayerPrefill, "take", chunk)
    monkeypatch.setattr(run_stats, "SLICE_S", 0.0)
    made = Heard(noted(talk.ask_each(texts), events), 2)
    first = "".join("t" if each == "token" else "c" for each in events)
    assert made.tokens == expected and "tctctct" in first and made.metrics[0].together == 1


def noted(pieces: Iterator[tuple[int, Any]], events: list[str]) -> Iterator[tuple[int, Any]]:
    for each in pieces:
        events.append("token")
        yield each


@pytest.mark.cases(1)
@pytest.mark.parametrize("scarce", [False, True])
def test_conversations_join_while_others_answer(
    runner: Runner, scarce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is asked of its own conversation, with settings of its own."""
    documents = ["The owl slept.", DOCUMENT.strip(), "Nobody came to the party, so they left."]
    lengths = ([3, 8, 5], [8], [2, 6])

    def conversations() -> Iterator[tuple[Conversation, Any, list[tuple[str, dict[str, Any]]]]]:
        for document, own in zip(documents, lengths, strict=True):
            talk = runner.conversation(budget="64")
            talk.read_ahead(document)
            texts = [f"{document}\n\n{question}" for question in QUESTIONS]
            settings = [{"max_new_tokens": length} for length in own]
            yield talk, talk.config, [*zip(texts, settings, strict=False)]

    if scarce:
        monkeypatch.setattr(together, "spare_bytes", lambda devices: 0)
    made = Heard(ask_all(conversations(), Callbacks()), 6)
    alone = [
        [piece.token_id for _, piece in talk.ask_each([text], **settings)]
        for talk, _, questions in conversations()
        for text, settings in questions
    ]
    assert made.tokens == alone
    assert [len(tokens) for tokens in alone] == [3, 8, 5, 8, 2, 6]
    assert [metrics.together for metrics in made.metrics] == (
        [1] * 6 if scarce else [4, 5, 5, 5, 5, 5]  # the first has ended when the last begin
    )


def test_what_is_wrong_with_one_question(runner: Runner) -> None:
    texts = [TEXTS[0], f"{DOCUMENT.strip()}\n\n{'why ' * 400}", "something else", TEXTS[2]]
    made = heard(begun(runner, budget="64"), texts)
    assert made.tokens[0] == alone(runner, texts[0], budget="64")
    assert made.tokens[3] == alone(runner, texts[3], budget="64")
    assert "do not fit this model" in str(made.last[1])
    assert "does not begin with what was read ahead" in str(made.last[2])


def test_memory_that_one_answer_lacks(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = heard(begun(runner, budget="64", never_lossy=True))
    short = expected.metrics[1].seen_tokens - 3
    attend = LayerStep.attend

    def runs_out(self: LayerStep, *args: Any) -> torch.Tensor:
        if self.position == short and self.index == 1:
            raise torch.OutOfMemoryError("there is no more")
        return attend(self, *args)

    monkeypatch.setattr(LayerStep, "attend", runs_out)
    monkeypatch.setattr(compiled_rows, "plain", lambda *_: [])
    made = heard(begun(runner, budget="64", never_lossy=True))
    reasons = [metrics.finish_reason for metrics in made.metrics]
    assert reasons == ["length", "memory", "length", "length"]
    assert [made.tokens[at] for at in (0, 2, 3)] == [expected.tokens[at] for at in (0, 2, 3)]
    assert made.tokens[1][:-1] == expected.tokens[1][: len(made.tokens[1]) - 1]


def test_a_question_waits_for_memory(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be read is read again when another answer has ended."""
    expected = heard(begun(runner, budget="64")).tokens
    read, refused = Context.read_in_slices, list[int]()

    def runs_out(self: Context, *args: Any) -> Iterator[None]:
        if len(refused) < 2 and self.store is not None and self.store.begun:
            refused.append(1)
            if len(refused) == 2:
                raise kvlite.errors.OutOfMemory("there is no more")  # type: ignore[attr-defined]
        yield from read(self, *args)

    talk = begun(runner, budget="64")
    monkeypatch.setattr(Context, "read_in_slices", runs_out)
    made = heard(talk)
    assert len(refused) == 2 and made.tokens == expected


def test_memory_that_runs_out_beside_others_costs_no_quality(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is given up for it: the question is read again."""
    expected, take, left = heard(begun(runner, budget="64")), LayerPrefill.take, [0]

    def runs_out(self: LayerPrefill, *args: Any, **given: Any) -> torch.Tensor:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("there is no more")
        return take(self, *args, **given)

    def fails_next(pieces: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        for count, each in enumerate(pieces):
            left[0] = 2 * (not count)  # it is tried once more at once
            yield each

    talk = begun(runner, budget="64")
    monkeypatch.setattr(LayerPrefill, "take", runs_out)
    made = Heard(fails_next(talk.ask_each(TEXTS)), 4)
    assert made.tokens == expected.tokens
    assert [metrics.fallbacks for metrics in made.metrics] == [()] * 4


def test_a_question_waits_for_host_memory(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a copy of the store takes."""
    expected = heard(begun(runner, budget="64")).tokens
    copy, tried = StoreCopies.copy, list[int]()

    def runs_out(copies: StoreCopies) -> HostKVStore:
        tried.append(1)
        if len(tried) in (2, 3):  # it is tried once more at once
            raise MemoryError
        return copy(copies)

    talk = begun(runner, budget="64")
    monkeypatch.setattr(StoreCopies, "copy", runs_out)
    made = heard(talk)
    assert len(tried) == 6 and made.tokens == expected


def test_stopping_keeps_what_has_come(runner: Runner) -> None:
    expected, stop = heard(begun(runner, budget="64")).tokens, Event()

    def until(pieces: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        for count, each in enumerate(pieces):
            yield each
            if count == 14:
                stop.set()

    talk = begun(runner, budget="64")
    made = Heard(until(talk.ask_each(TEXTS, callbacks=Callbacks(cancel=stop))), 4)
    assert {metrics.finish_reason for metrics in made.metrics} == {"interrupted"}
    assert all(0 < len(own) < 8 for own in made.tokens)
    assert [own == whole[: len(own)] for own, whole in zip(made.tokens, expected, strict=True)]
    assert list(talk.stream(TEXTS[0]))


@pytest.mark.parametrize("shared", [True, False])
def test_copies_of_a_store_are_apart(
    runner: Runner, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("needs Linux")
    store = begun(runner, budget="64").store
    assert store is not None
    read = store.layers[0].read
    before = [[each.clone() for each in layer.cache.tensors] for layer in store.layers]
    copies = StoreCopies(store, 16)
    one, other = copies.copy(), copies.copy()
    for copy, value in ((one, 1.0), (other, 2.0)):
        for layer in copy.layers:
            entry = torch.full((1, len(layer.head_group.heads), 1, 8), value)
            where = torch.tensor([read], dtype=torch.int32)
            with torch.inference_mode():
                layer.append(entry, entry, where, 4, None, 0, None)
    for copy, value in ((one, 1.0), (other, 2.0)):
        for layer, tensors in zip(copy.layers, before, strict=True):
            keys = layer.head_group.residual_keys
            assert (keys[:, :, read] == value).all() and layer.read == read + 1
            flat = tensors[0].view(1, len(layer.head_group.heads), -1, 8)
            assert torch.equal(keys[:, :, :read], flat[:, :, :read])
    assert [layer.read for layer in store.layers] == [read] * len(store.layers)
    assert copies.own_bytes > 0
