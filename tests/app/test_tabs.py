"""A tab follows one thing at a time."""

import threading
import time

from kvlite_app.tabs import Tabs
from tests.app.conftest import waited


def test_who_goes_elsewhere_leaves_off_first() -> None:
    tabs, order, begun = Tabs(), list[str](), threading.Event()

    def follow() -> None:
        with tabs.following("one") as left:
            begun.set()
            assert left.wait(60)
            order.append("left")

    former = threading.Thread(target=follow)
    former.start()
    assert begun.wait(60)
    with tabs.following("one") as left:
        order.append("goes on")
        assert not left.is_set()
    former.join(60)
    assert order == ["left", "goes on"]
    assert tabs._following == {}


def test_of_many_that_begin_at_once_one_goes_on() -> None:
    tabs, at_once, job = Tabs(), threading.Barrier(8), list[threading.Event]()
    over = threading.Event()

    def follow() -> None:
        at_once.wait()
        with tabs.following("one") as left:
            job.append(left)
            while not (left.is_set() or over.is_set()):
                time.sleep(0.01)

    threads = [threading.Thread(target=follow) for _ in range(8)]
    for each in threads:
        each.start()
    waited(lambda: len(job) == 8 and sum(not left.is_set() for left in job) == 1)
    tabs.leave("one")
    assert all(left.is_set() for left in job)
    over.set()
    for each in threads:
        each.join(60)


def test_who_is_to_leave_off_is_woken_in_every_place() -> None:
    tabs, woken = Tabs(), list[str]()
    with (
        tabs.following("one", "a", wake=lambda: woken.append("answer")) as one,
        tabs.following("one", "a", "check", lambda: woken.append("check")) as other,
    ):
        tabs.leave("one", seconds=0.01)
        assert one.is_set() and other.is_set()
    assert woken == ["answer", "check"]


def test_who_comes_late_to_what_is_not_shown_any_more_leaves_off() -> None:
    tabs = Tabs()
    tabs.go("one", "a")
    tabs.go("one", "b")
    with tabs.following("one", "a") as left:
        assert left.is_set()
    with tabs.following("one", "b") as left:
        assert not left.is_set()
        (goes := threading.Thread(target=tabs.go, args=["one", "a"])).start()
        assert left.wait(60)
    goes.join(60)
