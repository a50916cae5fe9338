"""Reasoning in the app: folded above its answer while it comes and afterwards, and kept."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.conversation.export import as_markdown
from kvlite.conversation.record import Record, keys_of
from kvlite.web.openai_client import OpenAIClient
from kvlite.web.server_api import Upstream
from kvlite.web.work import Shown
from kvlite_app.engine.server_conversation import ServerHost
from kvlite_app.engine.service import Service
from kvlite_app.views.history import answering, history
from kvlite_app.views.status import status_html
from tests.app.conftest import Visitor, answered, send, serving
from tests.foreign import Foreign
from tests.thoughts import ANSWER, LARK, SAID, THOUGHT, speak, thinking_model

A = "a" * 32


@pytest.fixture(scope="module")
def thinker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_model(tmp_path_factory.mktemp("thinker"), tiny_folder)


@pytest.fixture
def service(thinker: Path, tmp_path: Path) -> Iterator[Service]:
    service = Service(Settings(model=str(thinker)), tmp_path)
    yield service
    service.close()


def shown(service: Service) -> list[tuple[str, str]]:
    """Titles and contents of what stands below the question."""
    messages = history(service.record("", A), service.store("")).messages[1:]
    return [(each.get("metadata", {}).get("title", ""), each["content"]) for each in messages]


def test_it_is_folded_above_the_answer_and_kept(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.load(service.host.settings).wait()
    assert service.model_host.runner is not None
    speak(monkeypatch, service.model_host.runner.tokenizer, ANSWER)
    work = service.say("", A, "Two and two?")
    work.wait()
    assert (work.shown.text, work.shown.reasoning) == (SAID, THOUGHT)
    count = work.shown.reasoning_tokens
    for text, doing in (("", "Thinking: "), (SAID, "Answering: ")):
        assert doing in status_html(replace(work.shown, ended=False, text=text))
    (title, thought), (_, said), (account, _) = shown(service)
    assert title == f"Thought for {count} tokens" and 15 < count < 25
    assert thought == THOUGHT.replace("<img", "<\u2060img") and said == SAID
    assert "first token" in account
    kept = Service(Settings(model="other"), tmp_path)
    assert shown(kept) == shown(service)
    exported = as_markdown(kept.record("", A), kept.store(""))
    assert SAID in exported and "Two and <" not in exported
    kept.close()


def test_what_was_cut_while_it_was_thought_goes_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.load(service.host.settings).wait()
    assert service.model_host.runner is not None
    speak(monkeypatch, service.model_host.runner.tokenizer, ANSWER)
    service.change("", A, {"max_new_tokens": 6}).wait()
    service.say("", A, "Two and two?").wait()
    titles = [title for title, _ in shown(service)]
    assert titles[0] == "Thought for 6 tokens" and len(titles) == 2
    assert "cut at 6 tokens" in titles[1]
    service.change("", A, {"max_new_tokens": 60}).wait()
    work = service.continue_answer("", A)
    work.wait()
    assert (work.shown.text, work.shown.reasoning) == (SAID, THOUGHT)
    (_, thought), (_, said), _ = shown(service)
    assert thought == THOUGHT.replace("<img", "<\u2060img") and said == SAID


def test_while_it_comes_its_tokens_are_counted() -> None:
    def titles(**values: Any) -> list[str]:
        made = answering(Shown(reasoning="Hm <img src=x>", reasoning_tokens=120, **values))
        return [each.get("metadata", each).get("title", each["content"]) for each in made]

    assert titles() == ["Thinking\u2026 120 tokens"]
    assert titles(text="So") == ["Thought for 120 tokens", "So"]
    assert answering(Shown(text="So"))[0]["content"] == "So" and not answering(Shown())
    (fold,) = answering(Shown(reasoning="a", reasoning_tokens=1))
    assert fold["metadata"]["status"] == "done", "which gradio shows folded"


def test_a_server_says_it_and_a_record_of_before_has_none(
    foreign: Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "deltas", [{"reasoning_content": "Hm"}, {"content": "So"}])
    settings = Settings(model="odd/one")
    upstream = Upstream(OpenAIClient(foreign.url), ["odd/one"], frozenset())
    service = Service(settings, tmp_path, reads_ahead=False, host=ServerHost(settings, upstream))
    service.say("", A, "Two?").wait()
    assert shown(service)[:2] == [("Thought for 1 token", "Hm"), ("", "So")]
    record = service.record("", A)
    plain = json.loads(record.to_json())
    for each in plain["said"]:
        del each["reasoning"], each["reasoning_tokens"]
    old = Record.from_json(json.dumps(plain))
    assert keys_of(old.said) == keys_of(record.said)
    service.close()


@pytest.mark.long
def test_a_browser_folds_it(visitor: Visitor, thinker: Path, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    with serving(tmp_path, "--model", str(thinker), "--schema", LARK) as server:
        page = visitor.open(server.address)
        send(page, "Two and two?")
        assert answered(page, 1) == ["It is four."]
        fold = page.locator("#chat .thought-group", has_text="Thought for")
        inside = fold.locator(".content", has_text="<\u2060img src=x>")
        expect(inside).not_to_be_visible()
        fold.locator(".title").click()
        expect(inside).to_be_visible()
        assert fold.locator("img").count() == 0
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.locator("#chat .message-buttons button[title*=opy]").last.click()
        assert page.evaluate("navigator.clipboard.readText()") == SAID
        page.reload()
        expect(page.locator("#chat .thought-group", has_text="Thought for")).to_have_count(1)
        page.locator("#tab-settings-button").click()
        page.get_by_text("Answer", exact=True).last.click()
        expect(page.locator("#set-thinking input")).to_have_value("auto")
        page.close()
