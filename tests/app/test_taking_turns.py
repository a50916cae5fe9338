"""Conversations that take turns with one model, on a tiny one."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gradio as gr
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvlite.config.settings import OPTIONS, Settings
from kvlite.conversation.library import Library
from kvlite.conversation.record import Record
from kvlite.conversation.session import Session
from kvlite.errors import ContextError, KvliteError, ModelError, SettingError, Stopped
from kvlite.memory.free import held_bytes
from kvlite.web.work import Work
from kvlite_app.engine.other_model import former_reader, price_of, read_again, return_to
from kvlite_app.engine.service import Service
from kvlite_app.form import shown_value
from kvlite_app.settings_events import SettingsEvents
from tests.app.conftest import waited
from tests.app.test_service import blocked
from tests.cli.conftest import model_of
from tests.conftest import SIZES

CPU = torch.device("cpu")
Make = Callable[..., Service]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For answers that go on for as long as a test wants: it never says that one has ended."""
    folder = model_of(tmp_path_factory.mktemp("tiny"), 100_000)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data[AutoTokenizer.from_pretrained(folder).all_special_ids] = 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make(tmp_path: Path, model: Path) -> Iterator[Make]:
    """Services that share a data folder, as a program has that is started again."""
    made = []

    def make(**values: Any) -> Service:
        settings = Settings().replace({"model": str(model), "max_new_tokens": 6, **values})
        made.append(Service(settings, tmp_path))
        return made[-1]

    yield make
    for service in made:
        service.close(30)


def new(service: Service) -> str:
    return service.store("").new().id


def say(service: Service, id: str, text: str) -> str:
    """The answer."""
    record: Record = service.say("", id, text).wait()
    return record.said[-1].text


def texts(service: Service, id: str) -> list[str]:
    """What was said, as it is on disk."""
    return [each.text for each in service.store("").record(id).said]


def answering(work: Work) -> None:
    """Wait until some of an answer has come."""
    waited(lambda: len(work.shown.text) > 20 or work.shown.ended)
    assert not work.shown.ended, work.failure or work.shown


@pytest.mark.long
def test_the_next_answer_is_the_same_after_another_conversation(make: Make) -> None:
    service = make()
    straight, taken, read = (new(service) for _ in range(3))
    for id in (straight, taken, read):
        say(service, id, "Where do herons live?")
    want = say(service, straight, "And foxes?")  # which sets the others aside
    store = service.store("")
    assert store.whole(taken).is_file()
    store.whole(read).unlink()
    assert say(service, taken, "And foxes?") == want
    assert say(service, read, "And foxes?") == want
    assert say(service, new(service), "And foxes?") != want
    assert texts(service, taken) == texts(service, read) == texts(service, straight)


@pytest.mark.long
def test_a_conversation_is_whole_after_the_end_and_not_read_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    id = new(first)
    say(first, id, "Where do herons live?")
    first.close(30)
    assert first.store("").whole(id).is_file()

    second = make()

    def read_again(*_: Any) -> None:
        raise AssertionError("it is read again")

    monkeypatch.setattr("kvlite.conversation.snapshot.read_again", read_again)
    second.change("", id, {"max_new_tokens": 50_000}).wait()
    work, waiting = second.say("", id, "And foxes?"), second.say("", new(second), "Hello")
    answering(work)
    second.close(30)  # in the middle of an answer, with another message behind it
    assert isinstance(waiting.failure, Stopped)
    assert second.store("").whole(id).is_file()
    part = texts(second, id)[3]
    assert part
    assert second.store("").record(waiting_id(second, id)).draft == "Hello"

    third = make()
    third.change("", id, {"max_new_tokens": 6}).wait()
    assert say(third, id, "And owls?")
    assert texts(third, id)[:4][3] == part


def waiting_id(service: Service, other: str) -> str:
    (id,) = {each.id for each in service.store("").records()} - {other}
    return id


@pytest.mark.long
def test_one_at_a_time_and_whoever_waits_is_told(make: Make) -> None:
    service = make(max_new_tokens=50_000)
    service.load(service.model_host.settings).wait()
    ids = [new(service) for _ in range(3)]
    works = [service.say("", id, "Hello") for id in ids]
    answering(works[0])
    assert [work.shown.before for work in works] == [0, 1, 2]
    with pytest.raises(SettingError, match="an answer is on its way"):
        service.say("", ids[1], "Hello again")
    for number, work in enumerate(works):
        answering(work)
        assert [each.shown.before for each in works[number:]] == [*range(3 - number)]
        work.cancel.set()
        work.wait()
    assert [len(texts(service, id)) for id in ids] == [2, 2, 2]


def test_two_messages_at_once_in_one_conversation_are_not_both_taken(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make()
    id, refused, both = new(service), list[Exception](), threading.Barrier(2)
    go = blocked(service)

    def send() -> None:
        both.wait()
        try:
            service.say("", id, "Hello")
        except SettingError as error:
            refused.append(error)

    # Between looking and taking there is time for the other one.
    save = Library.save
    monkeypatch.setattr(Library, "save", lambda *given: (threading.Event().wait(0.2), save(*given)))
    threads = [threading.Thread(target=send) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(refused) == 1
    go.set()


@pytest.mark.long
def test_messages_are_changed_and_branches_gone_to(make: Make) -> None:
    service = make()
    id = new(service)
    first = say(service, id, "Name a colour.")
    second = say(service, id, "Name an animal.")
    service.regenerate("", id).wait()
    assert texts(service, id) == ["Name a colour.", first, "Name an animal.", second]

    service.edit("", id, 2, "Name a town.").wait()
    assert texts(service, id)[:3] == ["Name a colour.", first, "Name a town."]
    record = service.undo("", id).wait()
    assert texts(service, id) == ["Name a colour.", first]
    assert record.draft == service.store("").record(id).draft == "Name a town."

    service.switch("", id, 1).wait()
    assert texts(service, id) == ["Name a colour.", first, "Name an animal.", second]
    service.branch("", id, 1).wait()
    assert texts(service, id) == ["Name a colour.", first]
    assert say(service, id, "Name an animal.") == second
    assert len(service.store("").record(id).branches) > 1

    checked = service.check("", id)
    checked.wait()
    assert checked.shown.text == second
    assert texts(service, id) == ["Name a colour.", first, "Name an animal.", second]


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Lets answers break off after a few tokens, until it is called."""
    heard = Session._heard

    def _heard(self: Session, *given: Any) -> Iterator[Any]:
        for number, piece in enumerate(heard(self, *given)):
            if number == 3:
                raise RuntimeError("the card fell out")
            yield piece

    monkeypatch.setattr(Session, "_heard", _heard)
    yield lambda: monkeypatch.setattr(Session, "_heard", heard)


@pytest.mark.long
def test_an_error_in_the_middle_is_a_sentence_and_loses_no_message(
    make: Make, breaks: Callable[[], None]
) -> None:
    service = make(max_new_tokens=50)
    id = new(service)
    for message in ("Hello", "Are you there?"):  # not in memory yet, and then it is
        work = service.say("", id, message)
        with pytest.raises(RuntimeError):
            work.wait()
        assert work.shown.error == "RuntimeError: the card fell out"
        record = service.store("").record(id)
        assert (record.draft, record.name) == (message, "Hello")
    breaks()
    say(service, id, "Are you there?")
    record = service.store("").record(id)
    assert record.draft == ""
    assert record.said[-2].text == "Are you there?"


@pytest.fixture(scope="module")
def fat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are too many to be mistaken for anything else."""
    folder = model_of(tmp_path_factory.mktemp("fat"), 512)
    sizes = {**SIZES, "vocab_size": 49152, "hidden_size": 1024, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def test_a_conversation_goes_on_with_another_model_which_reads_it_again(
    make: Make, model: Path, fat: Path
) -> None:
    service = make()
    id, store = new(service), service.store("")
    say(service, id, "Hello")
    before = texts(service, id)
    assert former_reader(service, "", id) is None
    service.load(service.model_host.settings.replace({"model": str(fat)})).wait()
    former = former_reader(service, "", id)
    assert former is not None and former.model == str(model)
    price = price_of(service, "", id).wait()
    assert price.tokens > 20 and price.seconds > 0
    assert texts(service, id) == before and store.record(id).model == str(model)
    work = service.say("", id, "And foxes?")
    titles = {shown.title for shown in work.follow(0)}
    work.wait()
    assert f"Reading Hello again with {fat.name}" in titles
    assert texts(service, id)[:3] == [*before, "And foxes?"]
    assert store.record(id).model == str(fat)
    assert former_reader(service, "", id) is None and price_of(service, "", id).wait() is None

    # The former one reads it again as well, without a message.
    return_to(service, former).wait()
    assert service.model_host.settings.model == str(model)
    before = texts(service, id)
    read_again(service, "", id).wait()
    assert former_reader(service, "", id) is None
    assert store.record(id).model == str(model) and texts(service, id) == before


def test_what_another_model_cannot_read_stays_as_it_was(
    make: Make, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    service = make()
    id, store = new(service), service.store("")
    say(service, id, "Hello " * 200)
    before, files = store.record(id), store.light(id).read_bytes()
    small = model_of(tmp_path_factory.mktemp("small"), 128)
    service.load(service.model_host.settings.replace({"model": str(small)})).wait()
    why = f"too long for {small}, which was trained for 128 tokens: go on with {model.name}"
    for work in (price_of(service, "", id), read_again(service, "", id)):
        with pytest.raises(ContextError, match=why):
            work.wait()
    with pytest.raises(ContextError, match=why):
        say(service, id, "And foxes?")
    assert store.light(id).read_bytes() == files
    assert store.record(id).said == before.said and store.record(id).draft == "And foxes?"
    assert say(service, new(service), "Hello")
    former = former_reader(service, "", id)
    assert former is not None
    return_to(service, former).wait()
    assert store.whole(id).is_file()  # nothing has to be read again
    assert say(service, id, "And foxes?")


@pytest.mark.long
def test_a_conversation_shows_the_settings_it_is_had_with(make: Make) -> None:
    first = make(method="full", stop=("END",))
    id = new(first)
    say(first, id, "Hello")
    first.change("", id, {"seed": 7}).wait()
    first.close(30)
    second = make(method="snapkv")
    settings_events, anyone = (
        SettingsEvents(second),
        cast(gr.Request, SimpleNamespace(username=None)),
    )
    *each, said, filled = settings_events.shown(id, anyone)
    assert (said, filled) == ("", each)
    shown = dict(zip(OPTIONS, each, strict=True))
    assert (shown["method"], shown["stop"], shown["seed"]) == ("full", "END", "7")
    shown = dict(zip(OPTIONS, settings_events.shown(new(second), anyone)[-1], strict=True))
    assert (shown["method"], shown["stop"], shown["seed"]) == ("snapkv", "", "")


@pytest.mark.long
def test_what_nobody_touched_stays_as_it_is_in_use(make: Make) -> None:
    service = make(temperature=0.0)
    id = new(service)
    say(service, id, "Hello")
    settings_events, anyone = (
        SettingsEvents(service),
        cast(gr.Request, SimpleNamespace(username=None, session_hash="tab")),
    )
    *shown, _, filled = settings_events.shown(id, anyone)
    service.change("", id, {"seed": 7}).wait()  # in another tab
    at = [*OPTIONS].index("temperature")
    shown[at] = 0.5
    told, known = [*settings_events.apply(id, filled, anyone, *shown)][-1]
    assert "message on: Temperature." in told
    assert known == shown
    now = service.settings_of("", id)
    assert (now.temperature, now.seed) == (0.5, 7)
    assert "Nothing to change" in [*settings_events.apply(id, known, anyone, *shown)][-1][0]
    other = new(service)
    settings_events.tabs.go("tab", other)
    shown[at] = 0.25
    assert [*settings_events.apply(id, known, anyone, *shown)][-1] == (gr.skip(), gr.skip())
    assert service.settings_of("", id).temperature == 0.25
    *came, said, _ = settings_events.loaded(id, settings_events.shown(other, anyone)[-1], anyone)
    news = {name: each for name, each in zip(OPTIONS, came, strict=True) if each != gr.skip()}
    assert (news, said) == ({"temperature": 0.25, "seed": "7"}, gr.skip())


def test_profiles_of_those_who_log_in_are_their_own(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_CONFIG", str(tmp_path / "config"))
    settings_events = SettingsEvents(make())
    ann, ben, owner = (
        cast(gr.Request, SimpleNamespace(username=name)) for name in ("ann", "ben", None)
    )
    controls = [shown_value(name, getattr(Settings(chunk=64), name)) for name in OPTIONS]
    settings_events.save("small", ann, *controls)
    settings_events.save("mine", owner, *controls)
    names = [settings_events.profiles(each).choices for each in (ann, ben, owner)]
    assert names == [[("small", "small")], [], [("mine", "mine")]]
    each = settings_events.take("small", ann, *controls)
    assert dict(zip(OPTIONS, each, strict=True))["chunk"] == "64"
    with pytest.raises(SettingError, match="small"):
        settings_events.remove("small", ben)
    assert settings_events.remove("small", ann).choices == []


@pytest.mark.long
def test_a_model_that_cannot_be_had_is_a_sentence_and_the_former_stays(
    make: Make, model: Path, tmp_path: Path
) -> None:
    service = make()
    id, host, settings = new(service), service.model_host, service.model_host.settings
    say(service, id, "Hello")
    runner, active = host.runner, host.active
    cut, larger = (shutil.copytree(model, tmp_path / name) for name in ("cut", "larger"))
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for values, refused in (
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"vram": "1MB"}, r"needs at least .*: use a smaller model"),
        ({"model": str(cut)}, "is damaged, get it again"),
    ):
        with pytest.raises(KvliteError, match=refused):
            service.load(settings.replace(values)).wait()
        assert host.runner is runner and host.active is active

    # Only loading tells that weights are missing.
    config = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    work = service.load(settings.replace({"model": str(larger)}))
    with pytest.raises(ModelError, match=r"model\.layers"):
        work.wait()
    assert work.shown.notes == (f"{model.name} is in use as before",)
    assert host.settings is settings and host.runner is not None is not host.active
    assert host.holds(service.store(""), id) is not None
    assert say(service, id, "And foxes?")


def test_loading_can_be_cancelled_and_the_former_model_comes_back(make: Make, fat: Path) -> None:
    service = make()
    id, settings = new(service), service.model_host.settings
    service.stop_loading()  # of which there is none
    say(service, id, "Hello")
    go = blocked(service)
    work = service.load(settings.replace({"model": str(fat)}))
    service.stop_loading()
    go.set()
    with pytest.raises(Stopped):
        work.wait()
    assert say(service, id, "And foxes?")
    assert service.model_host.settings is settings


@pytest.mark.long
def test_switching_models_frees_the_former_one(
    make: Make, fat: Path, model: Path, breaks: Callable[[], None]
) -> None:
    service = make(model=str(fat))
    # An answer that broke off must hold nothing either.
    broken = service.say("", new(service), "Hello")
    with pytest.raises(RuntimeError):
        broken.wait()
    breaks()
    say(service, new(service), "Hello")
    assert service.model_host.runner is not None
    weights = sum(each.nbytes for each in service.model_host.runner.model.tensors())
    assert weights > 190 << 20
    before = held_bytes([CPU])
    told = service.load(service.model_host.settings.replace({"model": str(model)})).wait()
    assert before - held_bytes([CPU]) > 0.8 * weights
    assert told.startswith(f"{fat.name} is gone, ")
    assert float(told.split()[3]) > 0.8 * weights / 1e6
    assert say(service, new(service), "Hello")
    assert broken.failure is not None
