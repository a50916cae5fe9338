"""The page for those who see little, or use no mouse."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import ACCOUNT, ANSWER, Server, Visitor, send, serving

expect: Any = pytest.importorskip("playwright.sync_api").expect
AXE: str = pytest.importorskip("axe_playwright_python.base").AXE_SCRIPT

# Targets of at least 24 pixels are a rule that has to be asked for.
RULES = {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}
# What is dark differs in colours alone.
COLOURS = {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}
SIDES = """(open) => {
  for (const id of ['conversations', 'side']) {
    const side = document.getElementById(id);
    if (side.classList.contains('open') !== open.includes(id))
      side.querySelector('.toggle-button').click();
  }
}"""
# What has the focus, by its name.
STOP = """() => {
  const at = document.activeElement;
  return at.ariaLabel || at.labels?.[0]?.innerText.trim() || at.innerText.trim();
}"""


@pytest.fixture
def endless(tmp_path: Path, talker: Path) -> Iterator[Server]:
    """An app whose answers come until they are stopped."""
    with serving(tmp_path / "app", "--model", str(talker), "--max-tokens", "50000") as server:
        yield server


@contextmanager
def standing_still(server: Server) -> Iterator[None]:
    """While the page is looked at, no more of the answer comes: it would take longer and longer."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def faults(page: Any, *beside: str) -> list[str]:
    """What is wrong with the page as it is, on a desk and on a phone, light and dark.

    Args:
        beside: the side of the page that is open on a phone.
    """
    found = list[str]()
    for width, open in ((1400, ["conversations", "side"]), (400, [*beside])):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("new Promise(requestAnimationFrame)")  # panels come and go with the room
        page.evaluate(SIDES, open)
        for dark, rules in ((False, RULES), (True, COLOURS)):
            page.evaluate("(dark) => document.body.classList.toggle('dark', dark)", dark)
            found += [
                f"{width} {'dark' if dark else 'light'}: {each['id']}: {node['html'][:200]} "
                f"{[check['message'] for check in node['any'] + node['all']]}"
                for each in page.evaluate("(rules) => axe.run(rules)", rules)["violations"]
                for node in each["nodes"]
            ]
    page.set_viewport_size({"width": 1400, "height": 900})
    page.evaluate("new Promise(requestAnimationFrame)")
    page.evaluate(SIDES, ["conversations", "side"])
    return found


@pytest.mark.long
def test_axe_finds_nothing_wrong_in_any_state(
    endless: Server, visitor: Visitor, tmp_path: Path
) -> None:
    page = visitor.open(endless.address)
    page.evaluate(AXE)
    assert faults(page) == []

    page.get_by_role("tab", name="Settings").click()
    page.locator("#set-model input").wait_for()
    for folded in page.locator("#side .label-wrap").all():
        folded.click()
    expect(page.locator("#price [data-peak]")).to_be_visible()
    assert faults(page, "side") == []
    page.locator("#set-vram textarea, #set-vram input").fill("seven")
    expect(page.locator("#price [role=alert]")).to_be_visible()
    assert faults(page, "side") == []
    page.get_by_role("tab", name="Memory").click()

    path = tmp_path / "waves.txt"
    path.write_text("The sea and the light of the far house. " * 1_500)
    page.locator("#box input[type=file]").set_input_files(path)
    page.locator("#box .thumbnail-item").wait_for()
    assert faults(page) == []
    send(page, "What is far?")
    expect(page.locator("#status .doing")).to_contain_text("Reading")
    with standing_still(endless):
        assert faults(page, "side") == []
    expect(page.locator(ANSWER)).to_have_text(re.compile(r"\w+ \w+"))
    with standing_still(endless):
        assert faults(page) == []
    page.locator("#box .stop-button").click()
    page.locator(ACCOUNT).wait_for()
    assert faults(page) == []

    page.locator(ACCOUNT).locator(".title").click()
    expect(page.locator(ACCOUNT).get_by_text("Memory at the peak")).to_be_visible()
    assert faults(page) == []
    assert faults(page, "side") == []
    page.locator("#listing .more").first.click()
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    assert faults(page, "conversations") == []
    page.locator("#listing .more").first.click()
    page.get_by_role("menuitem", name="Rename").click()
    assert faults(page, "conversations") == []
    page.keyboard.press("Escape")

    path = tmp_path / "broken.pdf"
    path.write_bytes(b"%PDF-1.7\nnothing of the kind")
    page.locator("#new").click()
    expect(page.locator(ANSWER)).to_have_count(0)  # or the box is emptied only then
    page.locator("#box input[type=file]").set_input_files(path)
    expect(page.locator("#status [role=alert]")).to_be_visible()
    assert faults(page) == []


@pytest.mark.long
def test_the_tab_key_comes_by_everything_in_the_order_in_which_it_is_read(
    endless: Server, visitor: Visitor
) -> None:
    page = visitor.open(endless.address)
    page.locator("#chat .example").first.wait_for()
    page.locator("#conversations .toggle-button").focus()
    stops = [page.evaluate(STOP)]
    while stops[-1] != "Settings":
        page.keyboard.press("Tab")
        stops.append(page.evaluate(STOP))
        assert len(stops) < 40
    assert [each for each in stops if "Select example" not in each] == [
        *("Conversations", "New conversation", "Search", page.locator("#model").inner_text()),
        *("Upload a file", "Message", "Send"),
        *("Memory and settings", "Memory", "Answer", "Models", "Settings"),
    ]
    page.keyboard.press("Enter")
    expect(page.locator("#set-model input")).to_be_visible()
    page.locator("#box textarea").focus()
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(ANSWER)).to_have_text(re.compile(r"\w+ \w+"))
    page.locator("#box .stop-button").press("Enter")
    page.locator(ACCOUNT).wait_for()
    page.locator(ACCOUNT).locator(".title").press("Enter")
    expect(page.locator(ACCOUNT).get_by_text("Memory at the peak")).to_be_visible()
