"""Tuning on a document, in the app."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from kvlite.bench.prose import bundled_prose
from kvlite.bench.tune import Tune
from kvlite.config.profiles import Profiles
from kvlite.errors import SettingError, Stopped
from kvlite_app.engine.service import Service
from kvlite_app.engine.tuning import TUNED, tune
from kvlite_app.settings_events import SettingsEvents
from kvlite_app.tuning_section import tuned_html
from tests.app.conftest import Visitor, answered, send, serving, upload
from tests.app.test_service import A

TEXT = " ".join(bundled_prose().split()[:340])
TAB: Any = gr.Request(session_hash="tab")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DATA", "CONFIG"):
        monkeypatch.setenv(f"KVLITE_{name}", str(tmp_path / name.lower()))
    return tmp_path


@pytest.mark.long
def test_what_is_proposed_is_kept_and_used(
    own: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.bench.tune.ROUNDS", 1)
    few = partial(Tune, methods=["snapkv:window=8"], budgets=["25%"], kv_bits=["16"])
    monkeypatch.setattr("kvlite_app.engine.tuning.Tune", few)
    events = SettingsEvents(service)
    with pytest.raises(SettingError, match="tune on a document first"):
        [*events.use_tuned(A, TAB)]
    service.say("", A, "What is it?", [upload(service, "report.txt", TEXT.encode())]).wait()
    with pytest.raises(SettingError, match=r"nowhere\.txt is not read here"):
        tune(service, "", A, "nowhere.txt", 10).wait()
    work = tune(service, "", A, "report.txt", 10)
    work.wait()
    assert work.shown.notes == ("Tuned for report.txt: Settings has what is proposed.",)
    found = service.store("").account(A, TUNED)
    shown = tuned_html(found)
    assert found["told"][0] in shown and "Proposed for report.txt" in shown
    assert [line["method"] for line in found["lines"]] and "hidden facts" in shown
    # The conversation goes on as it was, then with what is proposed.
    *_, told = events.use_tuned(A, TAB)
    assert "In use from the next message on" in told
    settings = service.settings_of("", A)
    assert {name: getattr(settings, name) for name in found["values"]} == found["values"]
    profile = Profiles(own / "config").read("tuned")
    assert profile.values == {**found["values"], "model": service.model_host.settings.model}
    service.say("", A, "And then?").wait()
    assert service.record("", A).questions == 2


@pytest.mark.long
def test_it_can_be_stopped_before_anything_was_measured(own: Path, service: Service) -> None:
    service.say("", A, "What is it?", [upload(service, "report.txt", TEXT.encode())]).wait()
    work = tune(service, "", A, "report.txt", 10)
    work.cancel.set()
    with pytest.raises(Stopped):
        work.wait()
    assert service.store("").account(A, TUNED) == {}


@pytest.fixture
def app(tmp_path: Path, tiny_folder: Path) -> Iterator[Any]:
    args = ("--model", str(tiny_folder), "--max-tokens", "4")
    with serving(tmp_path / "data", *args) as server:
        yield server


@pytest.mark.long
def test_a_document_is_tuned_for_beside_its_conversation(
    app: Any, visitor: Visitor, tmp_path: Path
) -> None:
    report = tmp_path / "report.txt"
    report.write_text(TEXT)
    page = visitor.open(app.address)
    page.locator("#box input[type=file]").set_input_files(report)
    page.locator("#box .thumbnail-item").wait_for()
    send(page, "What is it?")
    answered(page, 1)
    page.locator("#tune").click()
    page.locator("#tune-minutes input").fill("0.1")
    page.locator("#tune-begin").click()
    page.locator("#tuned").get_by_text("Proposed for report.txt").wait_for()
    page.locator("#status").get_by_text("Tuned for report.txt").wait_for()
    page.locator("#tuned-use").click()
    page.locator("#tuned-used").get_by_text("saved as the profile tuned").wait_for()
    page.reload()
    page.locator("#tune").click()
    page.locator("#tuned").get_by_text("Proposed for report.txt").wait_for()
