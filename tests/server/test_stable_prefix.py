"""Instructions that tell what time it is: what is told again, and what is not read again."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.server import conversations, kept
from kvlite.server.config import ServerConfig
from kvlite.server.stable_prefix import places_of_now, stable
from tests.server.conftest import Server, serving

OF_NOW = [
    "Today's date is [2026-11-29].",
    "  Today's date: [Sun Nov 29 2026]",
    "<current_date>[2026-11-29]</current_date>\n<timezone>Europe/Berlin</timezone>",
    "Today's date is [Sunday, November 29, 2026] (formatted by the user's locale)",
    "# Current Time\n[11/29/2026, 1:35:00 PM (UTC, UTC+0:00)]",
    "The current date is [2026-11-29 13:05:12].",
    "It is currently [2026-11-29T13:05:12.123Z].",
    "Current time in ISO 8601 UTC format: [2026-11-29T13:05:12.123Z]",
    "System time: [2026-11-29T13:05:12.123456+00:00]",
    "Be brief. The time is [14:03]. Say so.",
    "Now: [Sun Nov 29 12:36:33 UTC 2026]",
    "Date: [2026-11-29]\nTime: [2:03 PM]",
    '{"currentDate": "[2026-11-29]", "currentDateTime": "[2026-11-29 10:11]"}',
    "Today is [Sunday, the 29th of November 2026, 14:03 CET].",
    "**Current Date:** [29.11.2026]",
    "Current timestamp: [1790000000]",
    "Current local time (Europe/Berlin): [14:03]",
    "The current time is [9:59 a.m. on Sunday, November 29, 2026].",
]
OTHERS = [
    "The budget is 4,000 dollars.",
    "The deadline is 12 March 2026, at 14:00.",
    "Report what is due today at 14:00.",
    "Meetings today: 14:00 standup",
    "If it is Sunday, rest.",
    "The meeting time is 14:00.",
    "The current time limit is 12:30, the current version 2026-11-29.",
    "Date of birth: 12 March 1990",
    "Date: 12 March, in Rome",
    "Current date: 4000",
    "Prices as of 12 March 2026. Released on 2026-11-29.",
]
LONG = "Answer in one sentence, and say where you have it from. " * 12
CLOCK = "You are a clerk.\nThe current time is {}.\n" + LONG


ROADS: dict[str, Any] = {
    "/v1/chat/completions": lambda system: {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}],
        "max_tokens": 4,
    },
    "/v1/responses": lambda system: {
        "instructions": system,
        "input": "Hi",
        "max_output_tokens": 4,
    },
    "/v1/messages": lambda system: {
        "system": [{"type": "text", "text": system}],
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
    },
    "/api/chat": lambda system: {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}],
        "options": {"num_predict": 4},
        "stream": False,
    },
    "/api/generate": lambda system: {
        "system": system,
        "prompt": "Hi",
        "options": {"num_predict": 4},
        "stream": False,
    },
}
CHAT = "/v1/chat/completions"
ALLOWED = {"kvlite": {"stable_prefix": True}}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kept, conversations):
        monkeypatch.setattr(module, "SHORT", 100)


@pytest.fixture(scope="module")
def clerk(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(settings, ServerConfig(folder=tmp_path_factory.mktemp("clerk"))) as found:
        yield found


def asked(server: Server, road: str, system: str, **more: Any) -> tuple[int, Any]:
    """How many tokens were read for an answer, and the answer."""
    before = server.state.counters.fresh
    answer = server.http.post(road, json={**ROADS[road](system), **more})
    assert answer.status_code == 200, answer.text
    return server.state.counters.fresh - before, answer.json()


def notes_of(answer: Any) -> list[str]:
    """What an answer says of its prompt."""
    told = answer.get("usage", answer).get("kvlite") or {}
    return [each for each in told.get("notes", ()) if each.startswith("stable_prefix")]


@pytest.mark.parametrize("marked", [*OF_NOW, *OTHERS])
def test_dates_and_times_are_of_now_where_a_label_says_so(marked: str) -> None:
    text = marked.replace("[", "").replace("]", "")
    told = [text[begin:end] for begin, end in places_of_now(text)]
    assert told == [each.partition("]")[0] for each in marked.split("[")[1:]]


def test_texts_without_end_are_looked_through_in_no_time() -> None:
    since = time.monotonic()
    for each in ("today's date ", ". . ", "current date in ", "12:00 ", "<env>", "\n", "today is "):
        stable([{"role": "system", "content": each * 20_000}], ())
        stable([{"role": "user", "content": each * 20_000}], ())
        places_of_now(each + " " * 100_000)
    assert time.monotonic() - since < 10


@pytest.mark.parametrize("road", ROADS)
def test_a_clock_has_nothing_read_again(
    clerk: Server, road: str, caplog: pytest.LogCaptureFixture
) -> None:
    system = f"You are {road}.\n{CLOCK}"
    first, answer = asked(clerk, road, system.format("14:03"), **ALLOWED)
    assert first > 100 and not notes_of(answer)
    with caplog.at_level(logging.INFO, "kvlite.server"):
        again, answer = asked(clerk, road, system.format("14:08"), **ALLOWED)
    assert again < 20, "only what has to be read of any prompt"
    assert notes_of(answer) == ["stable_prefix: the model was told '14:03' in place of '14:08'"]
    assert "stable_prefix: 1 date" in caplog.text and "14:0" not in caplog.text
    assert "--stable-prefix" not in caplog.text
    third, answer = asked(clerk, road, system.format("9:59 p.m."), **ALLOWED)
    assert third < 20 and "'14:03' in place of '9:59 p.m.'" in notes_of(answer)[0]


@pytest.mark.parametrize("road", ROADS)
def test_unless_that_is_allowed_it_is_read_again_and_the_log_names_the_option(
    clerk: Server, road: str, caplog: pytest.LogCaptureFixture
) -> None:
    system = f"By {road}, without.\n{CLOCK}"
    first, _ = asked(clerk, road, system.format("14:03"))
    with caplog.at_level(logging.INFO, "kvlite.server"):
        again, answer = asked(clerk, road, system.format("14:08"))
    assert again > first - 40 and not notes_of(answer)
    assert "--stable-prefix, or kvlite.stable_prefix in requests" in caplog.text


def test_what_else_has_changed_is_never_kept(clerk: Server) -> None:
    system = "Count.\n" + CLOCK + "The budget is {} dollars."
    asked(clerk, CHAT, system.format("14:03", "4,000"), **ALLOWED)
    read, answer = asked(clerk, CHAT, system.format("14:03", "4,100"), **ALLOWED)
    assert read < 60 and not notes_of(answer)
    read, answer = asked(clerk, CHAT, system.format("14:08", "5,000"), **ALLOWED)
    assert read > 100 and not notes_of(answer), "another budget: other instructions"


def test_the_server_may_allow_it_and_a_request_may_not(settings: Settings, tmp_path: Path) -> None:
    with serving(settings, ServerConfig(folder=tmp_path, stable_prefix=True)) as server:
        asked(server, CHAT, CLOCK.format("14:03"))
        read, answer = asked(server, CHAT, CLOCK.format("14:08"))
        assert read < 20 and notes_of(answer)
        declined = {"kvlite": {"stable_prefix": False}}
        read, answer = asked(server, CHAT, CLOCK.format("14:09"), **declined)
        assert read > 100 and not notes_of(answer)
        wrong = {**ROADS[CHAT]("A"), "kvlite": {"stable_prefix": "yes"}}
        refused = server.http.post(CHAT, json=wrong)
        assert refused.status_code == 400 and "true or false" in refused.text


def test_a_server_that_is_started_again_knows_what_was_told(
    settings: Settings, tmp_path: Path
) -> None:
    config = ServerConfig(folder=tmp_path, stable_prefix=True)
    with serving(settings, config) as server:
        asked(server, CHAT, CLOCK.format("14:03"))
    with serving(settings, config) as server:
        read, answer = asked(server, CHAT, CLOCK.format("14:08"))
        assert read < 20 and "'14:03' in place of '14:08'" in notes_of(answer)[0]


def test_what_programs_say_in_the_first_message_is_told_again_and_not_what_the_user_says() -> None:
    system = {"role": "system", "content": "Be brief."}
    text = "<system-reminder>\nToday's date is {}.\n</system-reminder>\nThe time is {}. So?"

    def of(date: str, clock: str) -> list[dict[str, Any]]:
        later = [{"role": "assistant", "content": "A"}, {"role": "user", "content": text}]
        return [system, {"role": "user", "content": text.format(date, clock)}, *later]

    first = stable(of("2026-11-29", "14:03"), ())
    assert first.messages == of("2026-11-29", "14:03")
    then = stable(of("2026-11-30", "14:08"), first.times)
    assert then.messages == of("2026-11-29", "14:08")
    assert then.kept == [("2026-11-29", "2026-11-30")]


def test_a_model_is_told_no_time_of_another_day(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stable([{"role": "system", "content": CLOCK.format("14:03")}], ())
    later = time.time() + 25 * 3600
    monkeypatch.setattr("kvlite.server.stable_prefix.time.time", lambda: later)
    then = stable([{"role": "system", "content": CLOCK.format("15:03")}], first.times)
    assert not then.kept and "15:03" in then.messages[0]["content"]


@pytest.mark.parametrize("road", ROADS)
def test_billing_headers_are_left_out(clerk: Server, road: str) -> None:
    system = f"x-anthropic-billing-header: cc_version=2.1; cch={{}};\n{road}: {LONG}"
    asked(clerk, road, system.format("ab12f"))
    read, answer = asked(clerk, road, system.format("09cde"))
    assert read < 20 and not notes_of(answer)
    empty = stable([{"role": "system", "content": "x-anthropic-billing-header: a"}], ())
    assert not empty.messages
