"""`/model`: another model goes on with what was said."""

import gc
import weakref
from pathlib import Path

import pytest

from kvlite.errors import Stopped
from tests.chat.conftest import Chat
from tests.cli.conftest import model_of
from tests.thoughts import thinking_model


@pytest.fixture(scope="module")
def other(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_model(tmp_path_factory.mktemp("other"), tiny_folder)


def test_another_model_reads_again_what_was_said(chat: Chat, other: Path, tmp_path: Path) -> None:
    text = tmp_path / "herons.txt"
    text.write_text("Herons live by the water. " * 20)
    first = chat.session.given.model
    assert chat("/model") == f"{first} answers; /model NAME has another one go on."
    chat(f"/read {text}")
    chat("Where do herons live?")
    chat("/set temperature 0.5")
    chat("/save trip")
    said, entry = chat.session.talk.messages, chat.session.entry
    told = chat(f"/model {other}")
    tokens = len(chat.session.talk.token_ids)
    assert f"{other.name} reads {tokens:,} tokens again, about 1 s; Ctrl-C stays with tiny" in told
    assert told.endswith(f"{other.name}, fp32 on cpu · 1,024 tokens of context")
    assert chat.session.talk.messages == said
    assert chat.session.messages[0].documents[0].name == text.name
    assert chat.session.talk.settings.temperature == 0.5
    chat("And foxes?")
    assert len(chat.session.messages) == 2
    assert chat.session.entry is entry
    assert chat("/save trip").startswith("Saved as trip")
    assert not [*Path(chat.session.library.root).glob("model-*")]


def test_a_model_that_cannot_go_on_leaves_all_as_it_was(
    chat: Chat, other: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = model_of(tmp_path_factory.mktemp("small"), 64)
    chat("Hello " * 40)
    session, said = chat.session, chat.session.talk.messages
    runner, talk = session.runner, session.talk
    assert "no/such" in chat.refused("/model no/such")
    assert "too long for" in chat.refused(f"/model {small}")
    assert (session.runner, session.talk) == (runner, talk)  # nothing was loaded for that
    ids = [*talk.token_ids]
    del runner, talk

    chat.terminal.cancel.set()
    with pytest.raises(Stopped):
        chat(f"/model {other}")
    chat.terminal.cancel.clear()
    assert session.talk.messages == said and session.talk.token_ids == ids
    chat("And foxes?")
    assert len(session.messages) == 2


def test_what_fails_as_it_is_read_brings_the_former_model_back(
    chat: Chat, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat("Hello")
    said, ids = chat.session.talk.messages, [*chat.session.talk.token_ids]

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvlite.conversation.change_model.read_with", fails)
        with pytest.raises(MemoryError):
            chat(f"/model {other}")
    assert chat.session.given.model == chat.session.runner.settings.model != str(other)
    assert chat.session.talk.messages == said and chat.session.talk.token_ids == ids
    chat("And foxes?")


def test_the_former_model_is_freed(chat: Chat, other: Path, tiny_folder: Path) -> None:
    chat(f"/model {other}")  # the first one is a fixture's
    chat("Hello")
    former = weakref.ref(chat.session.runner.model)
    chat(f"/model {tiny_folder}")
    gc.collect()
    assert former() is None
    chat("And foxes?")
