"""A prompt is read in slices: what others do in between changes nothing, nor does leaving it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlite.config.settings import Settings
from kvlite.conversation import run_stats
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.prefix import answer_prompt, known_ids
from kvlite.conversation.runner import Runner
from kvlite.model.load import LoadedModel
from tests.conftest import Tiny
from tests.streamed import prompt, streamed

FIRST, SECOND, OTHER = (prompt(count, seed) for seed, count in enumerate((70, 90, 40)))

WAYS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "snapkv:window=8", "recall": "off"},
    {"method": "h2o"},
    {"method": "kvx"},
    {"method": "kvzip:passage=32,window=4"},
    {"method": "minicache"},
    {"method": "pyramidinfer"},
    {"method": "streaming"},
    {"method": "spans", "kv_bits": "4", "recall_bits": "8"},
    {"method": "spans", "scores": "host"},
]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is a slice."""
    monkeypatch.setattr(run_stats, "SLICE_S", 0.0)


def opened(model: LoadedModel, **settings: Any) -> Conversation:
    given = {"max_new_tokens": 5, "budget": "60", "chunk": 16, **settings}
    return Runner(model, Settings().replace(given)).conversation()


def pieces(talk: Conversation, ids: list[int]) -> Iterator[Piece | None]:
    return answer_prompt(talk, ids, ignore_eos=True)


def said(heard: Iterator[Piece | None]) -> list[int | None]:
    return [piece.token_id for piece in heard if piece is not None]


def require_unchanged(model: LoadedModel, **settings: Any) -> None:
    """A conversation's second prompt is begun and left, further on each time, and then read, while
    another answers."""
    talk, other = opened(model, **settings), opened(model, max_new_tokens=400, **settings)
    alone = said(pieces(opened(model, max_new_tokens=400, **settings), OTHER))
    first = said(pieces(talk, FIRST))
    ids, before = [*known_ids(talk), *SECOND], known_ids(talk)
    fresh = opened(model, **settings)
    assert said(pieces(fresh, FIRST)) == first
    expected = said(pieces(fresh, ids))
    going = pieces(other, OTHER)
    heard, slices = list[Piece | None](), 0
    for count in (1, 7, 15, 10**9):
        reading = pieces(talk, ids)
        for at, piece in enumerate(reading):
            if at == count or piece is not None:
                break
            slices = at + 1
            heard.append(next(going))
        if count < 10**9:
            reading.close()  # type: ignore[attr-defined]
            assert known_ids(talk) == before and not talk.cache.writing
    assert slices > 20 and piece is not None
    assert [piece.token_id, *said(reading)] == expected
    tokens = said(iter(heard))
    assert len(tokens) > 20 and tokens == alone[: len(tokens)]


@pytest.mark.cases(2, 7)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_whatever_the_method(llama: Tiny, way: dict[str, Any]) -> None:
    require_unchanged(llama.model, **way)


def test_with_streamed_weights_it_is_read_in_one_go(llama: Tiny, tmp_path: Path) -> None:
    """A step of others would bring every layer, and then this one again."""
    for model, waits in ((llama.model, True), (streamed(llama, tmp_path), False)):
        found = [*pieces(opened(model), FIRST)]
        assert (None in found) is waits and len(said(iter(found))) == 5
    assert torch.is_inference_mode_enabled() is False
