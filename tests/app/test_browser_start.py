"""What a stranger does first in the app: click a sample, drop a file, paste a long text."""

import re
from typing import Any

import pytest

from kvlite_app.layout import CHAT, EXAMPLES, QUESTION, sample_document
from tests.app.conftest import Server, Visitor, answered

expect: Any = pytest.importorskip("playwright.sync_api").expect

FILE = """() => {
  const data = new DataTransfer();
  data.items.add(new File(['Herons are blue. '], 'herons.txt', {type: 'text/plain'}));
  return data;
}"""
PASTE = """(text) => {
  const data = new DataTransfer();
  data.setData('text/plain', text);
  const event = {clipboardData: data, bubbles: true, cancelable: true};
  const pasted = new ClipboardEvent('paste', event);
  document.querySelector('#box textarea').dispatchEvent(pasted);
  return pasted.defaultPrevented; // as it is no text of the box then
}"""


def test_the_sample_document_ends_before_its_amendments() -> None:
    text = sample_document()
    assert text.startswith("The Constitution of the United States")
    assert text.rstrip().endswith("States so ratifying the Same.")
    assert "Amendment I" not in text


@pytest.mark.long
def test_samples_files_that_are_dropped_and_long_texts_that_are_pasted(
    server: Server, visitor: Visitor
) -> None:
    page = visitor.open(server.address)
    page.get_by_text(EXAMPLES[2]["display_text"]).click()
    expect(page.locator("#plan-tokens")).to_be_visible()
    page.get_by_text(EXAMPLES[1]["display_text"]).click()
    assert answered(page, 1)[0]
    expect(page.locator("#chat [data-testid=user]")).to_have_text(CHAT)
    page.dispatch_event("#chat", "drop", {"dataTransfer": page.evaluate_handle(FILE)})
    files = page.locator("#box .thumbnail-item")
    expect(files).to_have_attribute("title", "herons.txt")
    page.locator("#box textarea").focus()
    assert not page.evaluate(PASTE, "A short text.")
    assert page.evaluate(PASTE, "A long text. " * 200)
    expect(files).to_have_count(2)


@pytest.mark.long
def test_the_sample_document_is_shown_and_told_while_it_is_read(
    embedded: Server, visitor: Visitor
) -> None:
    page = visitor.open(embedded.address)
    page.get_by_text(EXAMPLES[0]["display_text"]).click()
    expect(page.locator("#chat [data-testid=user]")).to_have_text(QUESTION)
    expect(page.locator("#chat")).to_contain_text("About constitution.txt")
    expect(page.locator("#live [data-figure=reading]")).to_contain_text(re.compile(r"6,\d\d\d"))
    expect(page.locator("#live")).to_contain_text("hidden states")
    page.locator("#box .stop-button").click()
    expect(page.locator("#box .submit-button")).to_be_visible()
