"""What an answer was made from is said alike by the app, the server's usage and its metrics."""

import json
import re
from pathlib import Path

import gradio as gr
import pytest

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from kvlite_app.engine.service import Service
from kvlite_app.settings_events import SettingsEvents
from tests.server.conftest import said, serving

TEXT = "Herons stand in the water and wait. " * 90


@pytest.mark.parametrize(("room", "kept"), [(1 << 40, "all"), (-1, "some")])
def test_all_say_alike_what_auto_kept(
    tiny_folder: Path, tmp_path: Path, room: int, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.methods.budget.AUTO_LEAST", 128)
    monkeypatch.setattr("kvlite.conversation.what_is_kept.spare_for", lambda turn: room)
    settings = Settings(model=str(tiny_folder), max_new_tokens=4)
    service = Service(settings, tmp_path / "app")
    id = service.store("").new().id
    service.say("", id, TEXT).wait()
    (file,) = (service.store("").place(id) / "answers").glob("*.json")
    account = json.loads(file.read_text())
    service.close()
    with serving(settings, ServerConfig(folder=tmp_path / "server")) as server:
        asked = {"messages": said(TEXT), "max_tokens": 4}
        usage = server.http.post("/v1/chat/completions", json=asked).json()["usage"]["kvlite"]
        gauges = dict(
            re.findall(r"^kvlite:(\w+) ([\d.]+)$", server.http.get("/metrics").text, re.M)
        )
    for name in ("kept_entries_mean", "kv_bytes", "seen_tokens", "notes", "budget"):
        assert account["ledger"][name] == usage[name], name
    assert float(gauges["kept_entries"]) == pytest.approx(usage["kept_entries_mean"])
    assert int(gauges["kv_bytes"]) == usage["kv_bytes"]
    assert int(gauges["host_kv_bytes"]) == usage["host_kv_bytes"]
    all_kept = usage["kept_entries_mean"] == usage["seen_tokens"]
    assert all_kept == (kept == "all") == account["brief"].startswith("from all")
    assert all_kept or f"from {usage['kept_entries_mean']:,.0f} of" in account["brief"]
    assert all_kept or any("are lacking to keep everything" in each for each in usage["notes"])


def test_no_fewer_tokens_are_planned_for_than_a_conversation_has(service: Service) -> None:
    events, store, request = SettingsEvents(service), service.store(""), gr.Request()
    id = store.new().id
    assert events.plan_for(id, 10, request) == gr.skip()
    service.say("", id, TEXT).wait()
    (file,) = (store.place(id) / "answers").glob("*.json")
    seen = json.loads(file.read_text())["ledger"]["seen_tokens"]
    assert events.plan_for(id, 10, request).value == seen > 500
    assert events.plan_for(id, seen + 1, request) == gr.skip()
