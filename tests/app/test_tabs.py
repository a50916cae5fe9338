"""A tab follows one thing at a time."""

import threading

from kvlite_app.tabs import Tabs


def test_who_goes_elsewhere_leaves_off_first() -> None:
    tabs, order, begun = Tabs(), list[str](), threading.Event()

    def follow() -> None:
        with tabs.following("one") as left:
            begun.set()
            assert left.wait(10)
            order.append("left")

    former = threading.Thread(target=follow)
    former.start()
    assert begun.wait(10)
    with tabs.following("one") as left:
        order.append("goes on")
        assert not left.is_set()
    former.join(10)
    assert order == ["left", "goes on"]
    assert tabs._following == {}


def test_tabs_do_not_disturb_each_other() -> None:
    tabs = Tabs()
    with tabs.following("one") as one, tabs.following("other") as other:
        tabs.leave("third")
        assert not one.is_set()
        assert not other.is_set()


def test_nobody_waits_for_ever_for_one_who_does_not_leave() -> None:
    tabs = Tabs()
    with tabs.following("one") as left:
        tabs.leave("one", seconds=0.05)
        assert left.is_set()


def test_who_comes_late_to_what_is_not_shown_any_more_leaves_off() -> None:
    tabs = Tabs()
    tabs.go("one", "a")
    tabs.go("one", "b")
    with tabs.following("one", "a") as left:
        assert left.is_set()
    with tabs.following("one", "b") as left:
        assert not left.is_set()
        (goes := threading.Thread(target=tabs.go, args=["one", "a"])).start()
        assert left.wait(10)
    goes.join(10)


def test_only_who_shows_nothing_yet_arrives() -> None:
    tabs = Tabs()
    assert tabs.arrive("one", "a") and tabs.shows("one", "a")
    assert not tabs.arrive("one", "b") and tabs.shows("one", "a")
    tabs.go("other", "c")
    assert not tabs.arrive("other", "a") and tabs.shows("other", "c")
