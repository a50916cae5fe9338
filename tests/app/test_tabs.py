"""A tab follows one thing at a time."""

import threading

from kvlite_app.tabs import Tabs


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
