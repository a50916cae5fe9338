"""A conversation goes on with another model, as someone with a browser has it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Visitor, answered, send, serving
from tests.cli.conftest import model_of

expect: Any = pytest.importorskip("playwright.sync_api").expect


def use(page: Any, model: Path) -> None:
    """Choose a model in the settings."""
    page.locator("#tab-settings-button").click()
    page.locator("#set-model input").fill(str(model))
    page.locator("#set-model input").press("Enter")
    page.locator("#apply").click()
    expect(page.locator("#model")).to_have_text(model.name)


@pytest.fixture
def page(talker: Path, tmp_path: Path, visitor: Visitor) -> Iterator[Any]:
    with serving(tmp_path / "data", "--model", str(talker), "--max-tokens", "8") as server:
        page = visitor.open(server.address)
        yield page
        page.close()


def test_another_model_reads_a_conversation_again_or_the_former_one_stays(
    page: Any, talker: Path, tmp_path: Path
) -> None:
    other = model_of(tmp_path, 600)
    bar, again, stay = (page.locator(each) for each in ("#reader", "#read-again", "#stay"))
    send(page, "What is a cache?")
    first = answered(page, 1)
    expect(bar).to_have_count(0)
    use(page, other)
    expect(bar).to_contain_text(f"{other.name} reads this conversation again with your next")
    expect(bar).to_contain_text("tokens, about 1 s.")
    expect(again).to_have_text(f"Read again with {other.name}")
    stay.click()
    expect(page.locator("#model")).to_have_text(talker.name)
    expect(page.locator("#status")).to_contain_text(f"{talker.name} is in use again.")
    expect(bar).to_have_count(0)

    use(page, other)
    again.click()
    expect(bar).to_have_count(0)
    assert answered(page, 1) == first
    send(page, "And a lighthouse? " * 200)
    expect(page.locator("#status [role=alert]")).to_be_visible()
    send(page, "And a lighthouse?")
    answered(page, 2)

    # A message is enough, and another conversation has nothing to be read.
    use(page, talker)
    expect(bar).to_be_visible()
    page.locator("#new").click()
    expect(bar).to_have_count(0)
    page.locator("#listing .open").first.click()
    expect(bar).to_be_visible()
    send(page, "And a storm?")
    assert answered(page, 3)[0] == first[0]
    expect(bar).to_have_count(0)


def test_a_conversation_too_long_for_another_model_says_so_at_once(
    page: Any, talker: Path, tmp_path: Path
) -> None:
    small = model_of(tmp_path, 64)
    send(page, "What is a cache, and how large should one be? " * 5)
    answered(page, 1)
    use(page, small)
    bar = page.locator("#reader")
    expect(bar).to_contain_text(f"go on with {talker.name}, or with a model that has a longer")
    expect(page.locator("#read-again")).to_have_count(0)
    expect(page.locator("#stay")).to_be_visible()
