"""Documents from a browser."""

from pathlib import Path
from typing import Any

import pytest

from kvlite_app.web.uploading import LARGEST
from tests.app.conftest import Server, Visitor, answered, send

expect: Any = pytest.importorskip("playwright.sync_api").expect


def choose(page: Any, path: Path) -> None:
    page.locator("#box input[type=file]").set_input_files(path)
    page.locator("#box .thumbnail-item").wait_for()


@pytest.mark.long
def test_a_file_that_is_too_large_is_refused_in_a_sentence(
    server: Server, visitor: Visitor, tmp_path: Path
) -> None:
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(LARGEST + (1 << 20))  # which takes no room
    page = visitor.open(server.address)
    page.locator("#box textarea").fill("What is this?")
    page.locator("#box input[type=file]").set_input_files(large)
    expect(page.locator(".toast-body")).to_contain_text("maximum allowed size")
    expect(page.locator("#box textarea")).to_have_value("What is this?")
    visitor.errors[:] = [each for each in visitor.errors if "413" not in each]


@pytest.mark.long
def test_the_same_file_from_two_tabs_is_read_in_both(
    server: Server, visitor: Visitor, tmp_path: Path
) -> None:
    path = tmp_path / "karsk.txt"
    path.write_text("The lighthouse of Karsk was built in 1911.")
    pages = [visitor.open(server.address) for _ in range(2)]
    for page in pages:
        page.locator("#new").click()
        choose(page, path)
    for page in pages:
        send(page, "When was it built?")
        answered(page, 1)
        expect(page.locator("#chat").get_by_text("About karsk.txt")).to_be_visible()
