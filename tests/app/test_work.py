"""The engine's thread, and what those who wait are shown."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest

from kvlite.errors import SettingError, Stopped
from kvlite.web.engine_thread import Engine
from kvlite.web.work import Shown, Work
from kvlite_app.views.status import status_html
from tests.app.conftest import waited


@pytest.fixture
def engine() -> Any:
    engine = Engine()
    yield engine
    engine.close(seconds=5)


def test_whoever_waits_sees_how_many_go_first(engine: Engine) -> None:
    go = threading.Event()
    first = engine.submit(lambda work: go.wait(60), "first")
    waited(lambda: engine.current is first)
    second, third = (engine.submit(lambda work: None, name) for name in ("second", "third"))
    assert (second.shown.before, third.shown.before) == (1, 2)
    assert "Waiting: another one goes first" in status_html(second.shown)
    assert "Waiting: 2 others go first" in status_html(third.shown)
    go.set()
    third.wait()
    assert third.shown.before == 0


def test_whoever_waits_is_told_for_what_if_all_may_know(engine: Engine) -> None:
    go = threading.Event()
    engine.submit(lambda work: go.wait(60), "Loading", public="the model is being loaded")
    second = engine.submit(lambda work: None, "second")
    waited(lambda: second.shown.behind)
    assert "the model is being loaded" in status_html(second.shown)
    go.set()
    second.wait()


def test_what_goes_wrong_is_a_sentence_and_ends_nothing_else(engine: Engine) -> None:
    def fails(work: Work) -> None:
        raise SettingError("--top-k -1 is out of range")

    def breaks(work: Work) -> None:
        raise ZeroDivisionError("division")

    first, second = engine.submit(fails, ""), engine.submit(breaks, "")
    with pytest.raises(SettingError):
        first.wait()
    with pytest.raises(ZeroDivisionError):
        second.wait()
    assert first.shown.error == "--top-k -1 is out of range"
    assert "ZeroDivisionError" in second.shown.error
    assert engine.submit(lambda work: 3, "").wait() == 3


def test_work_that_is_cancelled_while_it_waits_never_begins(engine: Engine) -> None:
    go, begun = threading.Event(), threading.Event()
    engine.submit(lambda work: go.wait(60), "")
    work = engine.submit(lambda work: begun.set(), "")
    work.cancel.set()
    go.set()
    with pytest.raises(Stopped):
        work.wait()
    assert not begun.is_set()


class Large:
    """Something that should not stay."""


def gone(held: "weakref.ref[Large]") -> bool:
    end = time.monotonic() + 60
    while held() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return held() is None


def test_work_that_failed_keeps_nothing_of_what_was_there(engine: Engine) -> None:
    held: list[weakref.ref[Large]] = []

    def task(work: Work) -> None:
        model = Large()
        held.append(weakref.ref(model))
        try:
            raise KeyError(3)
        except KeyError:
            raise SettingError("no") from ZeroDivisionError()

    work = engine.submit(task, "")
    with pytest.raises(SettingError, match="no"):
        work.wait()
    assert gone(held[0])


def test_a_last_piece_of_work_is_done_when_all_else_has_ended() -> None:
    engine, done = Engine(), list[str]()

    def task(work: Work) -> None:
        assert work.cancel.wait(60)
        done.append("first")

    first = engine.submit(task, "")
    second = engine.submit(lambda work: done.append("second"), "")
    waited(lambda: engine.current is first)
    engine.close(lambda work: done.append("last"), 10)
    assert done == ["first", "last"]
    assert isinstance(second.failure, Stopped)


def test_nothing_is_done_nor_waited_for_once_it_is_closed() -> None:
    engine, done = Engine(), list[int]()
    engine.close(seconds=10)
    late = engine.submit(lambda work: done.append(1), "")
    assert late.shown.ended
    with pytest.raises(Stopped):
        late.wait()
    assert done == []


def test_time_left_is_told_as_it_went_so_far() -> None:
    for done, total, passed, left in (
        (0, 10, 5.0, None),
        (5, 10, 5.0, 5.0),
        (9, 10, 9.0, 1.0),
        (5, 10, 0.5, None),
    ):
        shown = Shown(done=done, total=total, since=100.0)
        assert shown.seconds_left(100.0 + passed) == left


def test_what_was_slow_at_first_does_not_count_for_the_rest() -> None:
    work = Work(lambda work: None, "Reading")
    work.show(since=0.0)  # it took its time before anything was done
    work.progress(2, 10)
    first = work.shown
    assert first.since > 0 and first.seconds_left(first.since + 5) is None
    work.progress(4, 10)
    assert work.shown.seconds_left(first.since + 2) == 6.0
    work.begin("Reading the question")
    work.progress(1, 3)
    assert work.shown.first == 1
