"""`kvlite app --server`: a server answers, kvlite's own or one that knows little of the API."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.errors import SettingError, SnapshotError, Stopped
from kvlite.server.config import ServerConfig
from kvlite.web.openai_client import OpenAIClient
from kvlite.web.server_api import Upstream
from kvlite.web.work import Work
from kvlite_app.engine.server_conversation import ServerHost
from kvlite_app.engine.service import Service
from tests.app.conftest import Visitor, send, serving, upload, waited
from tests.foreign import HELD, Foreign
from tests.server.conftest import serving as server_of

FACTS = b"The lighthouse of Karsk was built in 1911.\n"


def service_of(url: str, root: Path, settings: Settings, *given: str) -> Service:
    upstream = Upstream(OpenAIClient(url), [settings.model], frozenset(given))
    return Service(settings, root, reads_ahead=False, host=ServerHost(settings, upstream))


def texts(service: Service, id: str) -> list[str]:
    return [each.text for each in service.record("", id).said]


def said(work: Work) -> str:
    work.wait()
    return work.shown.text


def test_a_foreign_server_is_sent_all_that_was_said(foreign: Foreign, tmp_path: Path) -> None:
    settings = Settings(model="odd/one", system="Be brief.", top_k=7)
    service = service_of(foreign.url, tmp_path, settings)
    store = service.store("")
    id = store.new().id
    facts = upload(service, "facts.txt", FACTS)
    assert said(service.say("", id, "When?", [facts])) == "odd/one heard 2: When?"
    assert not Path(facts).exists()
    first = foreign.asked[-1]
    assert (first["temperature"], first["top_k"]) == (0.0, 7)
    assert not {"top_p", "kvlite", "seed", "max_tokens"} & first.keys()
    who = "Who\u2028\x85\x1c?"  # three lines to Python, one to the server
    assert said(service.say("", id, who)) == f"odd/one heard 4: {who}"
    sent = foreign.asked[-1]["messages"]
    assert [each["role"] for each in sent] == ["system", "user", "assistant", "user"]
    assert sent[0]["content"] == "Be brief." and "built in 1911" in sent[1]["content"]
    record = service.record("", id)
    assert record.model == "odd/one" and record.said[0].documents == ("facts.txt",)
    (account,) = [
        json.loads(each.read_text())["brief"]
        for each in (store.place(id) / "answers").glob("*.json")
        if "Who" in each.read_text()
    ]
    assert account.startswith("odd/one · first token") and account.endswith(
        "is full: ask it to go on"
    )

    service.close()
    service = service_of(foreign.url, tmp_path, settings)  # the next day
    assert said(service.edit("", id, 1, "Where?")) == "odd/one heard 2: Where?"
    assert "built in 1911" in foreign.asked[-1]["messages"][1]["content"]
    service.switch("", id, 1).wait()
    assert texts(service, id)[0::2] == ["When?", who]
    service.branch("", id, 1).wait()
    service.undo("", id).wait()
    record = service.record("", id)
    assert (record.said, record.draft, record.waiting) == ([], "When?", ["facts.txt"])
    assert [each.title for each in record.branches][1] == "Where?" and record.branch == 3
    assert said(service.say("", id, "How?")) == "odd/one heard 2: How?"
    assert said(service.regenerate("", id, temperature=0.7)) == "odd/one heard 2: How?"
    assert foreign.asked[-1]["temperature"] == 0.7 and service.record("", id).branch == 4
    service.change("", id, {"temperature": 0.5}).wait()
    service.load(settings.replace({"model": "two"})).wait()
    assert said(service.say("", id, "Why?")) == "two heard 4: Why?"
    assert foreign.asked[-1]["temperature"] == 0.5
    service.close()


def test_what_goes_wrong_leaves_what_was_said(foreign: Foreign, tmp_path: Path) -> None:
    settings = Settings(model="odd/one")
    service = service_of(foreign.url, tmp_path, settings)
    store = service.store("")
    id = store.new().id
    service.say("", id, "Hello").wait()
    before = texts(service, id)
    stopped = service.say("", id, HELD)
    while len(foreign.asked) < 2:
        assert not stopped.ended.wait(0.01)
    stopped.cancel.set()
    assert stopped.ended.wait(60) and isinstance(stopped.failure, Stopped)
    assert foreign.left.wait(60)
    assert texts(service, id) == before and service.record("", id).draft == HELD
    with pytest.raises(SettingError, match="no seeds here"):
        service.regenerate("", id, seed=3).wait()
    assert texts(service, id) == before and len(service.record("", id).branches) == 1
    for impossible in (service.check, service.continue_answer):
        with pytest.raises(SettingError, match="a server cannot"):
            impossible("", id).wait()
    foreign.shutdown()
    foreign.server_close()
    with pytest.raises(SettingError, match="cannot be reached"):
        service.say("", id, "Still there?").wait()
    assert texts(service, id) == before
    store.served(id).write_text("{")
    with pytest.raises(SnapshotError, match="is damaged"):
        service.say("", id, "And now?").wait()
    service.close()


def test_a_silent_server_holds_up_nobody_else(
    foreign: Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(foreign.url, tmp_path, Settings(model="odd/one"))
    first, second = service.store("").new().id, service.store("").new().id
    silent = service.say("", first, HELD)
    waited(lambda: len(foreign.asked) == 1)
    assert said(service.say("", second, "Hello?")) == "odd/one heard 1: Hello?"
    assert service.busy("") == [first] and not silent.ended.is_set()
    assert service.close(patience=60) == "" and silent.ended.is_set()
    assert service.record("", first).draft == HELD

    monkeypatch.setattr("kvlite.web.openai_client.SILENCE", 0.2)
    service = service_of(foreign.url, tmp_path, Settings(model="odd/one"))
    with pytest.raises(SettingError, match=r"has said nothing for 0\.2 seconds: "):
        service.say("", first, HELD).wait()
    service.close()


@pytest.mark.parametrize("looks", [1, 2])
def test_nothing_stays_of_what_is_deleted_while_it_is_answered(
    foreign: Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """Though it was there when its account, and then what was said, was about to be written."""
    service = service_of(foreign.url, tmp_path, Settings(model="odd/one"))
    store, looked, deleting = service.store(""), list[str](), list[threading.Thread]()
    is_gone, id = store.is_gone, store.new().id

    def deletes() -> None:
        service.forget("", id).wait()

    def looks_then_deletes(id: str) -> bool:
        was = is_gone(id)
        if threading.current_thread().name == "kvlite first":
            looked.append(id)
            if len(looked) == looks:
                deleting.append(threading.Thread(target=deletes))
                deleting[0].start()
                if not store._lock.locked():  # where it is, who deletes has to wait
                    deleting[0].join()
        return was

    monkeypatch.setattr(store, "is_gone", looks_then_deletes)
    assert service.say("", id, "Hello").ended.wait(60)
    deleting[0].join(60)
    assert is_gone(id) and not store.place(id).exists()
    service.close()


@pytest.mark.long
def test_kvlites_own_server_says_what_the_model_says_here(given: Settings, tmp_path: Path) -> None:
    here = Service(given, tmp_path)
    facts = upload(here, "facts.txt", FACTS)
    began_here, with_facts = here.store("").new().id, here.store("").new().id
    expected = said(here.say("", began_here, "Who?"))
    expected_of_facts = said(here.say("", with_facts, "When?", [facts]))
    expected_then = said(here.say("", with_facts, "And then?"))
    other = here.store("").new().id
    here.say("", other, "Who?").wait()
    expected_later = said(here.say("", other, "And then?"))
    config = ServerConfig(folder=tmp_path / "server")
    with server_of(given, config) as server:
        # In another thread: the browser's tests leave an event loop running in this one.
        with ThreadPoolExecutor(1) as one:
            (name, *_) = one.submit(OpenAIClient(server.address).models).result()
        there = service_of(server.address, tmp_path, given.replace({"model": name}))
        id = there.store("").new().id
        facts = upload(there, "facts.txt", FACTS)
        assert said(there.say("", id, "When?", [facts])) == expected_of_facts
        assert said(there.say("", id, "And then?")) == expected_then
        # What was begun here goes on here alone, and is as it was.
        assert texts(there, began_here) == ["Who?", expected]
        for each in (began_here, with_facts):
            with pytest.raises(SnapshotError, match="without --server"):
                there.say("", each, "And now?").wait()
        there.close()
    assert said(here.say("", began_here, "And then?")) == expected_later
    with pytest.raises(SnapshotError, match="with --server"):
        here.say("", id, "And now?").wait()
    here.close()


@pytest.mark.long
def test_the_page_has_what_a_server_can_say(
    foreign: Foreign, visitor: Visitor, tmp_path: Path
) -> None:
    expect: Any = pytest.importorskip("playwright.sync_api").expect
    with serving(tmp_path, "--server", foreign.url) as app:
        page = visitor.open(app.address, ready="#answer")
        expect(page.locator("#model")).to_have_text("one")
        send(page, "What is a cache?")
        account = page.locator("#chat [data-testid=bot]:has-text('first token')")
        expect(account).to_have_count(1)
        expect(page.locator("#chat")).to_contain_text("odd/one heard 1: cache?")
        expect(page.get_by_role("tab", name="Memory")).to_have_count(0)
        page.locator("#model").click()
        expect(page.locator("#set-temperature")).to_be_visible()
        for absent in ("method", "vram", "device"):
            expect(page.locator(f"#set-{absent}")).to_have_count(0)
        page.locator("#set-model input").click()
        page.get_by_role("option", name="two").click()
        page.locator("#apply").click()
        expect(page.locator("#model")).to_have_text("two")
        send(page, HELD)
        waited(lambda: len(foreign.asked) == 2)
        page.locator("#box .stop-button").click()
        assert foreign.left.wait(180)
        expect(page.locator("#box .stop-button")).to_have_count(0)
        send(page, "And a kernel?")
        expect(page.locator("#chat")).to_contain_text("two heard 3: kernel?")
        page.reload()
        expect(account).to_have_count(2)
        page.close()
