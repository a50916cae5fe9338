"""The page on screens of any width, what it shows of memory, and files that it cannot read."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import ACCOUNT, Server, Visitor, answered, client, send, waited
from tests.app.test_browser import looked_again

expect: Any = pytest.importorskip("playwright.sync_api").expect

ROOM = """() => {
  const box = document.getElementById("box").getBoundingClientRect();
  const seen = (x) => document.elementFromPoint(x, box.y + box.height / 2)?.closest("#box");
  return seen(box.left + 9) && seen(box.right - 9) ? box.width : 0;
}"""


@pytest.mark.long
def test_on_a_phone_the_figures_of_an_answer_are_below_it(server: Server, visitor: Visitor) -> None:
    page = visitor.open(server.address)
    send(page, "What is a lamp?")
    answered(page, 1)
    page.set_viewport_size({"width": 400, "height": 800})
    page.reload()
    page.locator("#side:not(.open)").wait_for()
    answered(page, 1)
    account = page.locator(ACCOUNT)
    account.locator(".title").click()
    expect(account.get_by_text("Memory at the peak")).to_be_visible()
    expect(page.locator("#answer")).to_contain_text("Answer to “What is a lamp?”")
    expect(page.locator("#side")).not_to_have_class(re.compile(r"\bopen\b"))
    account.locator(".title").click()
    expect(account.get_by_text("Memory at the peak")).not_to_be_visible()


@pytest.mark.long
def test_no_panel_lies_over_the_conversation_at_any_width(server: Server, visitor: Visitor) -> None:
    page = visitor.open(server.address)
    for width, open in ((1920, 2), (1100, 2), (1024, 1), (800, 1), (390, 0), (1000, 1), (1400, 2)):
        page.set_viewport_size({"width": width, "height": 800})
        expect(page.locator(".sidebar.open")).to_have_count(open)
        waited(lambda: page.evaluate(ROOM) > 300)
    page.set_viewport_size({"width": 800, "height": 800})
    expect(page.locator("#conversations.open")).to_have_count(0)
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#side.open")).to_have_count(0)
    expect(page.locator("#conversations.open")).to_be_visible()
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator(".sidebar.open")).to_have_count(0)
    page.reload()
    page.locator("#side.open").wait_for()
    expect(page.locator("#conversations.open")).to_have_count(0)
    assert page.locator("#box").bounding_box()["height"] < 120


@pytest.mark.long
def test_what_is_shown_of_memory_is_what_the_meter_says(server: Server, visitor: Visitor) -> None:
    page = visitor.open(server.address)
    send(page, "What is memory?")
    answered(page, 1)
    told = client(server)

    def agree() -> bool:
        for place in told.predict(api_name="/memory"):
            for name, nbytes in place["parts"].items():
                if name in ("weights", "KV, full attention", "this program"):
                    row = page.locator(f'#live tr[data-part="{name}"]')
                    shown = int(row.get_attribute("data-bytes"))
                    if abs(shown - nbytes) > 0.02 * nbytes:
                        return False
        return True

    waited(agree)
    # It goes on by itself: other programs come and go.
    looked_again(page)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b"", "empty.txt"),
        ("broken.pdf", b"%PDF-1.7\nnothing of the kind", "broken.pdf"),
        ("picture.txt", b"\x89PNG\r\n\x1a\n" + bytes(300), "picture.txt"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_a_sentence(
    server: Server, visitor: Visitor, tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    page = visitor.open(server.address)
    page.locator("#box textarea").fill("What is this?")
    page.locator("#box input[type=file]").set_input_files(path)
    told = page.locator("#status [role=alert]")
    expect(told).to_contain_text(sentence)
    expect(page.locator("#box .thumbnail-item")).to_have_count(0)
    assert str(tmp_path) not in told.inner_text()
    assert "gradio" not in told.inner_text()
    # The question is not lost.
    expect(page.locator("#box textarea")).to_have_value("What is this?")
