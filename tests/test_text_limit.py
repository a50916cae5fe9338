"""Texts that cannot fit are refused before they are tokenized; none that fits is."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlite
from kvlite.conversation.session import Session
from kvlite.documents import Document
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import ContextError, Stopped
from kvlite.model.text_limit import require_fits, text_limit, text_limit_of, tokenized


class Watched:
    """A tokenizer that counts what it is given."""

    def __init__(self, own: Any) -> None:
        self.own, self.characters = own, 0
        self.backend_tokenizer, self.get_vocab = own.backend_tokenizer, own.get_vocab

    def encode(self, text: str, **options: Any) -> list[int]:
        self.characters += len(text)
        return list(self.own.encode(text, **options))


def test_counting_ends_once_there_are_too_many(smollm: kvlite.Runner) -> None:
    watched = Watched(smollm.tokenizer)
    text = "A word and another. " * 20_000
    assert len(text) < text_limit(smollm.tokenizer, 8192)
    with pytest.raises(ContextError, match="about 100,00"):
        require_fits(watched, text, 8192)
    assert watched.characters < len(text) / 4


def test_the_longest_token_repeated_fits(smollm: kvlite.Runner) -> None:
    longest = max(smollm.tokenizer.get_vocab(), key=len)
    text = smollm.tokenizer.convert_tokens_to_string([longest]) * 512
    assert len(text) > 30_000
    assert len(smollm.tokenizer.encode(text)) <= 512
    require_fits(smollm.tokenizer, text, 512)


# Of control characters the model has no tokens at all, and leaves them out.
TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=400)


@given(TEXTS, st.integers(1, 400))
def test_what_fits_is_never_refused(smollm: kvlite.Runner, text: str, times: int) -> None:
    whole = text * times
    require_fits(smollm.tokenizer, whole, len(smollm.tokenizer.encode(whole)))


def test_limit_is_told_from_the_files_alone(smollm: kvlite.Runner, tmp_path: Path) -> None:
    most = smollm.shape.max_context
    assert text_limit_of(smollm.model_path) == text_limit(smollm.tokenizer, most)
    assert text_limit_of(tmp_path) is None
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    assert text_limit_of(tmp_path) is None


def test_whoever_cancels_does_not_wait_for_the_tokenizer(smollm: kvlite.Runner) -> None:
    cancel, over = threading.Event(), threading.Event()
    text = " ".join("word" for _ in range(7_000))

    def encode() -> list[int]:
        cancel.set()
        over.wait(600)
        return []

    with pytest.raises(Stopped):
        tokenized(encode, smollm.tokenizer, text, 8192, cancel)
    over.set()
    assert tokenized(lambda: [3], smollm.tokenizer, text, 8192, threading.Event()) == [3]


def test_a_document_behind_another_is_not_counted_once_cancelled(smollm: kvlite.Runner) -> None:
    session, cancel = Session(smollm, smollm.settings), threading.Event()
    session.waiting = [Document("a.txt", "Herons.", ())]
    cancel.set()
    with pytest.raises(Stopped):
        session.read([Document("b.txt", "A word. " * 2_000, ())], Callbacks(cancel=cancel))
    assert len(session.waiting) == 1


def test_errors_of_the_tokenizer_come_back(smollm: kvlite.Runner) -> None:
    def encode() -> list[int]:
        raise KeyError("odd")

    with pytest.raises(KeyError, match="odd"):
        tokenized(encode, smollm.tokenizer, " ".join("word" for _ in range(7_000)), 8192)


@pytest.mark.parametrize("how", ["read", "read_ahead", "stream", "edit"])
def test_conversation_refuses_a_text_before_it_is_tokenized(
    smollm: kvlite.Runner, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = smollm.conversation(max_new_tokens=1)
    list(talk.stream("Hello."))
    before = talk.token_ids
    text = "word " * text_limit(smollm.tokenizer, 8192)
    encode = type(smollm.tokenizer).encode

    def watched(self: Any, text: str, *args: Any, **options: Any) -> Any:
        assert len(text) < 100_000
        return encode(self, text, *args, **options)

    monkeypatch.setattr(type(smollm.tokenizer), "encode", watched)
    with pytest.raises(ContextError, match=r"8,192"):
        if how == "edit":
            list(talk.edit(1, text))
        else:
            list(getattr(talk, how)(text) or ())
    assert (talk.token_ids, len(talk.messages)) == (before, 2)
