"""A conversation goes on with another model, which reads again what was said."""

import threading
from pathlib import Path
from typing import Any

import pytest

import kvlite
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.retold import price_of, read_with
from kvlite.conversation.session import Session
from kvlite.conversation.snapshot import Snapshot
from kvlite.documents import Document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.errors import ContextError, SettingError, SnapshotError, Stopped
from tests.cli.conftest import model_of
from tests.thoughts import speak, thinking_model

HERONS = Document("herons.txt", "Herons live by the water. " * 30, (0,))
SYSTEM = "Answer in one word."


def runner_of(folder: Path, **given: Any) -> kvlite.Runner:
    return kvlite.load(str(folder), **{"max_new_tokens": 6, **given})


@pytest.fixture(scope="module")
def thinker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, with a template of its own, which begins reasoning."""
    return thinking_model(tmp_path_factory.mktemp("thinker"), tiny_folder)


@pytest.fixture
def session(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Two messages, the first about a document, and the second in other words on a branch."""
    runner = runner_of(tiny_folder, system=SYSTEM)
    session = Session(runner, runner.settings)
    session.read([HERONS], NO_CALLBACKS)
    with monkeypatch.context() as patch:
        speak(patch, runner.tokenizer, " By the water.", " In dens.", " On roofs.")
        for text in ("Where do herons live?", "And foxes?"):
            [*session.say(text)(NO_CALLBACKS)]
        [*session.edit(2, "And <|im_end|> storks?")(NO_CALLBACKS)]
    return session


def straight(session: Session, runner: kvlite.Runner, patch: pytest.MonkeyPatch) -> Conversation:
    """A conversation in which that model was told the same, and said the same answers."""
    talk = runner.conversation(system=SYSTEM, max_new_tokens=100)
    answers = [each["content"] for each in session.talk.messages if each["role"] == "assistant"]
    with patch.context() as own:
        speak(own, runner.tokenizer, *(f"\n</think>\n\n{each}" for each in answers))
        for message in session.messages:
            [*talk.stream(message.said)]
    return talk


def test_it_reads_what_it_would_have_read_had_all_been_said_to_it(
    session: Session, thinker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, runner = tmp_path / "talk.kv", runner_of(thinker)
    session.talk.save(path, light=True)
    with pytest.raises(SnapshotError, match="another model"):
        runner.open(path)
    told = list[tuple[int, int]]()
    talk = read_with(runner, path, Callbacks(lambda done, of: told.append((done, of))))
    direct = straight(session, runner, monkeypatch)
    assert talk.messages == session.talk.messages
    assert talk.token_ids == direct.token_ids[: len(talk.token_ids)]
    ends = [[node.prompt_end for node in each.history.branch.nodes] for each in (talk, direct)]
    assert ends[0] == ends[1]
    assert told[-1][0] == told[-1][1] == len(talk.token_ids)
    assert price_of(runner, path).tokens == len(talk.token_ids)

    # It goes on, on all branches; its documents and their passages are known.
    again = Session(runner, runner.settings)
    again.resume(talk)
    assert [each.text for each in again.messages] == [each.text for each in session.messages]
    assert again.messages[0].documents == (HERONS,)
    former = [each.messages for each in talk.branches]
    assert former == [each.messages for each in session.talk.branches]
    again.switch(1, NO_CALLBACKS)
    assert again.messages[1].text == "And foxes?"
    *_, last = again.say("What is by the water?")(NO_CALLBACKS)
    assert not [note for note in last.metrics.notes if "passages" in note]
    *_, last = again.edit(1, "Where do they live?")(NO_CALLBACKS)
    assert again.messages[0].documents == (HERONS,)


def test_documents_that_wait_are_read_for_the_next_message(
    tiny_folder: Path, thinker: Path, tmp_path: Path
) -> None:
    runner, path = runner_of(tiny_folder), tmp_path / "talk.kv"
    session = Session(runner, runner.settings)
    session.read([HERONS], NO_CALLBACKS)
    session.talk.save(path, light=True)
    other = runner_of(thinker)
    again = Session(other, other.settings)
    again.resume(read_with(other, path))
    assert again.waiting == [HERONS]
    assert len(again.talk.token_ids) > 100
    assert price_of(other, path).tokens > 100
    [*again.say("Where do herons live?")(NO_CALLBACKS)]
    assert again.messages[0].documents == (HERONS,)


def test_what_cannot_be_is_a_sentence_and_the_file_stays(
    session: Session, thinker: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path / "talk.kv"
    session.talk.save(path, light=True)
    before = path.read_bytes()
    small = runner_of(model_of(tmp_path_factory.mktemp("small"), 128))
    for work in (price_of, read_with):
        with pytest.raises(
            ContextError,
            match=r"too long for .*small0, which was trained for 128 tokens: go on with tiny, or",
        ):
            work(small, path)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Stopped):
        read_with(runner_of(thinker), path, Callbacks(cancel=cancel))
    assert path.read_bytes() == before


def test_what_no_message_says_is_known_to_the_former_model_alone(
    tiny_folder: Path, thinker: Path, tmp_path: Path
) -> None:
    talk, path, other = runner_of(tiny_folder).conversation(), tmp_path / "talk.kv", None
    talk.read("What a program said first.")
    for _ in range(2):
        talk.save(path, light=True)
        other = other or runner_of(thinker)
        with pytest.raises(
            SnapshotError, match="only the model that read it knows: go on with tiny"
        ):
            read_with(other, path)
        [*talk.stream("Hello")]


def refuses(*_: Any) -> Settings:
    raise SettingError("chai needs a calibration")


def test_settings_that_it_cannot_have_are_left_out(
    tiny_folder: Path, thinker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path, told = runner_of(tiny_folder), tmp_path / "talk.kv", list[str]()
    talk = runner.conversation(system=SYSTEM, temperature=0.5)
    [*talk.stream("Hello")]
    talk.save(path, light=True)
    other = runner_of(thinker)
    kept = read_with(other, path).settings
    assert (kept.temperature, kept.system) == (0.5, SYSTEM)
    monkeypatch.setattr(Snapshot, "settings", refuses)
    kept = read_with(other, path, Callbacks(notify=told.append)).settings
    assert (kept.temperature, kept.system) == (other.settings.temperature, SYSTEM)
    assert told[0] == "it goes on without its own settings: chai needs a calibration"
