"""Whatever anybody sends, it is answered or refused in a sentence."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from gradio.state_holder import SessionState

from kvlite.config.settings import Settings
from kvlite_app.engine.service import Service
from kvlite_app.form import Models
from kvlite_app.page import make_page
from kvlite_app.web.validation import ValidatedPage
from tests.app.conftest import awaited

ODD = [
    None,
    5,
    -1,
    10**30,
    float("inf"),
    float("nan"),
    True,
    "zz",
    "\0",
    "\ud800",
    ["a"],
    {"a": 1},
    {"path": "\0"},
    {"path": "/etc/passwd"},
    {"text": 5, "files": 7},
]
PLACES = [
    None,
    5,
    {},
    {"index": "a", "value": 1},
    {"index": [], "value": "x", "previous_value": "y"},
    {"index": [None], "value": "x", "previous_value": "y"},
    {"index": -5, "value": "x", "previous_value": "y"},
    {"index": [10**30, 0], "value": "x", "previous_value": "y"},
    {"index": float("inf"), "value": "x", "previous_value": "y"},
    {"index": 0, "value": {"path": "/etc/passwd"}, "previous_value": "y"},
]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ValidatedPage]:
    """The app's, without a model."""
    monkeypatch.setenv("KVLITE_CONFIG", str(tmp_path / "config"))
    service = Service(Settings(model=str(tmp_path / "none")), tmp_path)
    yield make_page(service, Models(others=False))
    service.close()


async def outcome(
    page: ValidatedPage, event: Any, given: list[Any], data: Any = None, state: Any = None
) -> Any:
    """What an event comes to, or the sentence that refuses it."""
    about = {"event_data": gr.EventData(None, data)} if data is not None else {}
    try:
        made = await page.process_api(
            event, given, state or SessionState(page), gr.Request(session_hash="tab"), **about
        )
    except gr.Error as error:
        assert not error.print_exception, error
        assert "\n" not in error.message and len(error.message) < 300, error
        return error.message
    return made["data"]


def told(page: ValidatedPage, *given: Any) -> Any:
    """Likewise, from where nothing is awaited."""
    return awaited(outcome(page, *given))


@pytest.mark.long
def test_odd_values_are_refused_in_a_sentence_or_are_nothing(page: ValidatedPage) -> None:
    async def all_of_them() -> None:
        state = SessionState(page)
        for event in page.fns.values():
            if event.fn is None:
                continue
            usual = [getattr(each, "value", None) for each in event.inputs]
            step = min(max(1, len(usual)), len(ODD))
            for number, odd in enumerate(ODD):
                await outcome(page, event, [odd] * len(usual), state=state)
                for place in range(number % step, len(usual), step):
                    one_odd = [*usual[:place], odd, *usual[place + 1 :]]
                    await outcome(page, event, one_odd, state=state)
            await outcome(page, event, usual[:-1], state=state)

    awaited(all_of_them())


def test_a_place_that_is_none_is_refused_in_a_sentence(page: ValidatedPage) -> None:
    for event in page.fns.values():
        if event.fn is not None and event.fn.__name__ in ("edit", "choose"):
            for data in PLACES:
                told(page, event, ["", 0], data)


def named(page: ValidatedPage, name: str) -> Any:
    return next(each for each in page.fns.values() if each.api_name == name)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["Hello", ["a"]], "conversation ['a'] is not text"),
        ([5, ""], "message 5 is not text"),
        (["Hello", float("inf")], "inf is too large, or no number"),
        ([None, None], "the message is empty: say something"),
        (["a"], "this is not what the page sends"),
    ],
)
def test_a_refusal_says_what_is_wrong(page: ValidatedPage, given: list[Any], said: str) -> None:
    assert said in told(page, named(page, "say"), given)


def test_what_is_searched_for_may_be_nothing(
    page: ValidatedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite_app.sidebar_events.time", lambda: 1.5)
    assert told(page, named(page, "found"), [None]) == told(page, named(page, "found"), [""])
