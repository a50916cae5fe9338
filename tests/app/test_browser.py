"""The app as someone with a browser has it."""

import json
import re
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.app.conftest import ACCOUNT, ANSWER, Server, Visitor, answered, send, serving, waited

expect: Any = pytest.importorskip("playwright.sync_api").expect

FACTS = (
    "The lighthouse of Karsk was built in 1911 by Ilse Brandt. It is 44 metres high.\n"
    "Its keeper is called Tomas Weil, and he owns a grey donkey.\n"
)


def row(page: Any, title: str) -> Any:
    """The conversation of this title in the list."""
    return page.locator("#listing .open", has_text=title)


def choose(page: Any, title: str, action: str) -> None:
    """Choose from the menu of a conversation."""
    page.get_by_role("button", name=f"Rename, export or delete {title}").click()
    page.get_by_role("menuitem", name=action).click()


# All at once: they are drawn anew as they are read.
FIGURES = """(all) =>
  Object.fromEntries(all.map((each) => [each.dataset.figure, Number(each.dataset.value)]))"""


def figures(page: Any) -> dict[str, float]:
    """The figures beside the conversation, by name."""
    found: dict[str, float] = page.locator("#live [data-figure]").evaluate_all(FIGURES)
    return found


def looked_again(page: Any) -> None:
    """Wait until the page has looked at memory once more, so that what an action might have done
    wrong has been done."""
    before = page.locator("#live").inner_html()
    waited(lambda: page.locator("#live").inner_html() != before)


def test_a_chat_is_answered_with_its_account_and_kept(
    server: Server, talker: Path, visitor: Visitor
) -> None:
    page = visitor.open(server.address)
    send(page, "What is a cache?")
    (answer,) = answered(page, 1)
    assert len(answer) > 10
    expect(page.locator("#listing .open").first).to_have_text("What is a cache?")
    account = page.locator(ACCOUNT)
    assert re.search(r"from all \d+ tokens · first token [\d.]+ s", account.inner_text())
    waited(lambda: figures(page).get("seen", 0) > 20 and figures(page).get("kv", 0) > 0)
    expect(page.locator("#answer")).not_to_be_visible()
    account.locator(".title").click()
    expect(page.locator("#answer")).to_be_visible()
    expect(account).to_contain_text("tokens of the conversation")
    expect(page.locator("#answer")).not_to_contain_text("tokens of the conversation")
    expect(page.locator("#answer")).to_contain_text("Answer to “What is a cache?”")

    page.reload()
    assert answered(page, 1) == [answer]
    expect(page).to_have_title("What is a cache? · kvlite")
    expect(page.locator("#model")).to_have_text(talker.name)


@pytest.mark.long
def test_an_answer_goes_on_behind_its_limit_is_copied_without_its_account_and_is_inert(
    server: Server, visitor: Visitor
) -> None:
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visitor.open(server.address)
    hostile = (
        "<script>window.caught = 1</script> <img src=x onerror='window.caught = 2'> "
        "![x](http://example.org/x.png) <iframe src='http://example.org'></iframe> "
        "<a href='javascript:window.caught=3'>link</a>"
    )
    send(page, hostile)
    (part,) = answered(page, 1)
    page.locator("#continue").click()
    waited(lambda: len(answered(page, 1)[0]) > len(part))
    (answer,) = answered(page, 1)
    assert answer.startswith(part[:20])
    expect(page.get_by_test_id("user")).to_contain_text("onerror='window.caught = 2'>")
    looked_again(page)
    assert page.evaluate("window.caught === undefined")
    assert page.locator("#chat img, #chat iframe, #chat script").count() == 0
    for link in page.locator("#chat a").all():
        assert not (link.get_attribute("href") or "").startswith("javascript")

    def copied(message: int) -> list[str]:
        page.get_by_role("button", name="Copy message").nth(message).click()
        return str(page.evaluate("navigator.clipboard.readText()")).split()

    waited(lambda: copied(1) == answer.split())
    page.evaluate("delete Navigator.prototype.clipboard")  # as where an address is not secure
    box = page.locator("#box textarea")

    def pasted() -> list[str]:
        page.locator("#chat .message-buttons-left button").first.click()
        box.fill("")
        page.keyboard.press("Control+v")
        return str(box.input_value()).split()

    waited(lambda: pasted() == answer.split())


def test_escape_stops_and_back_goes_back(tmp_path: Path, talker: Path, visitor: Visitor) -> None:
    with serving(tmp_path, "--model", str(talker), "--max-tokens", "50000") as server:
        page = visitor.open(server.address)
        send(page, "Go on and on.")
        expect(page.locator(ANSWER)).to_have_text(re.compile(r"\w+ \w+"))
        page.keyboard.press("Escape")
        answered(page, 1)
        expect(page).to_have_title("Go on and on. · kvlite")
        page.locator("#new").click()
        expect(page.locator(ANSWER)).to_have_count(0)
        expect(page).to_have_title("kvlite")
        page.go_back()
        expect(page).to_have_title("Go on and on. · kvlite")
        answered(page, 1)
        page.go_forward()
        expect(page).to_have_title("kvlite")
        expect(page.locator(ANSWER)).to_have_count(0)
        page.close()


@pytest.mark.long
def test_an_answer_can_be_stopped_and_its_part_stays(
    tmp_path: Path, talker: Path, visitor: Visitor
) -> None:
    with serving(tmp_path, "--model", str(talker), "--max-tokens", "50000") as server:
        page = visitor.open(server.address)
        send(page, "Tell me a very long story about a lighthouse, with many chapters.")
        expect(page.locator(ANSWER)).to_have_text(re.compile(r"\w+ \w+ \w+"))
        page.locator("#box .stop-button").click()
        (part,) = answered(page, 1)
        assert part
        assert "interrupted" in page.locator(ACCOUNT).inner_text()
        page.reload()
        assert answered(page, 1) == [part]

        # The browser goes away in the middle of an answer: it comes all the same.
        page.locator("#new").click()
        expect(page.locator(ANSWER)).to_have_count(0)
        send(page, "Tell me another one, as long.")
        expect(page.locator(ANSWER)).to_have_text(re.compile(r"\w+ \w+"))
        page.close()
        page = visitor.open(server.address)
        for _ in range(2):
            expect(page.locator(ANSWER)).to_have_text(re.compile(r"\w+ \w+ \w+"))
            page.reload()  # it is loaded again, and no error is told of
        expect(page.locator("#box .stop-button")).to_be_visible()
        page.locator("#box .stop-button").click()
        (before,) = answered(page, 1)

        # The server is killed in the middle of one: what was said before is there again.
        send(page, "And one more.")
        expect(page.locator(ANSWER)).to_have_count(2)
        page.close()
        server.end(signal.SIGKILL)
    visitor.errors.clear()  # of losing the server
    with serving(tmp_path, "--model", str(talker), "--max-tokens", "50000") as server:
        page = visitor.open(server.address)
        assert answered(page, 1) == [before]
        expect(page.locator("#box textarea")).to_have_value("And one more.")
        page.locator("#box textarea").press("Enter")
        expect(page.locator(ANSWER)).to_have_count(2)
        page.locator("#box .stop-button").click()
        assert answered(page, 2)[0] == before
        page.close()


@pytest.mark.long
def test_messages_are_edited_answered_again_undone_and_branched(
    server: Server, visitor: Visitor
) -> None:
    page = visitor.open(server.address)
    send(page, "Name a colour.")
    answered(page, 1)
    send(page, "Name an animal.")
    first, second = answered(page, 2)

    page.get_by_role("button", name="Answer again").last.click()
    expect(page.locator("#branches")).to_be_visible()
    assert answered(page, 2)[0] == first
    page.locator("#former").click()
    branch = page.locator("#branches input")
    expect(branch).to_have_value(re.compile(r"1/2 · "))
    waited(lambda: answered(page, 2) == [first, second])
    page.locator("#later").click()
    expect(branch).to_have_value(re.compile(r"2/2 · Name an animal\. → \w+"))

    page.get_by_role("button", name="Edit").last.click()
    page.locator("#chat textarea").fill("Name a town.")
    page.locator("#chat").get_by_role("button", name="Submit").click()
    expect(page.get_by_test_id("user").last).to_have_text("Name a town.")
    expect(branch).to_have_value("3/3 · Name a town.")
    assert answered(page, 2)[0] == first

    page.get_by_role("button", name="Take the question back").last.click()
    expect(page.get_by_test_id("user")).to_have_count(1)
    expect(page.locator("#box textarea")).to_have_value("Name a town.")
    page.locator("#box textarea").fill("")

    branch.click()
    page.get_by_role("option").first.click()
    expect(branch).to_have_value(re.compile(r"1/3 · "))
    waited(lambda: answered(page, 2) == [first, second])

    page.locator(ANSWER).first.click()  # which shows what it was made from
    expect(page.locator("#answer")).to_contain_text("Answer to “Name a colour.”")
    page.locator("#fork").click()
    expect(page.get_by_test_id("user")).to_have_count(1)
    assert answered(page, 1) == [first]
    send(page, "Name a river.")
    assert answered(page, 2)[0] == first


@pytest.mark.long
def test_others_are_shown_while_an_answer_comes(
    tmp_path: Path, talker: Path, visitor: Visitor
) -> None:
    with serving(tmp_path, "--model", str(talker), "--max-tokens", "50000") as server:
        page = visitor.open(server.address)
        send(page, "Name a colour.")
        expect(page.locator("#box .stop-button")).to_be_visible()
        expect(page.locator(ANSWER)).to_have_text(re.compile(r"\w+"))
        page.locator("#box .stop-button").click()
        answered(page, 1)
        page.locator("#new").click()
        expect(page.locator(ANSWER)).to_have_count(0)
        page.locator("#search textarea, #search input").fill("colour")
        send(page, "Tell me a very long story about a lighthouse.")
        expect(page.locator(ANSWER)).to_have_text(re.compile(r"\w+ \w+ \w+"))
        listed = page.locator("#listing .open")
        expect(listed).to_have_text(["Name a colour."])  # what is searched for still

        other = visitor.open(server.address)  # follows it too
        expect(other.locator("#box .stop-button")).to_be_visible()
        send(other, "Mine.")
        expect(other.get_by_text("an answer is on its way")).to_be_visible()
        page.locator("#search textarea, #search input").fill("")
        expect(listed).to_have_count(2)

        busy = page.get_by_role("img", name="being answered")
        expect(row(page, "Tell me").locator(busy)).to_be_visible()
        expect(other.locator("#box textarea")).to_have_value("Mine.")  # which is not lost
        expect(other.locator("#box .stop-button")).to_be_visible()
        other.close()
        row(page, "Name a colour.").click()  # the answer goes on, elsewhere
        expect(page.get_by_test_id("user")).to_have_text("Name a colour.")
        looked_again(page)
        expect(page.get_by_test_id("user")).to_have_text("Name a colour.")
        expect(page.locator("#box .stop-button")).to_have_count(0)

        page.locator("#new").click()
        expect(page.get_by_test_id("user")).to_have_count(0)
        row(page, "Tell me").click()
        expect(page.get_by_test_id("user")).to_have_text(re.compile("Tell me"))
        before = page.locator(ANSWER).inner_text()
        expect(page.locator(ANSWER)).not_to_have_text(before)
        row(page, "Name a colour.").click()
        expect(page.get_by_test_id("user")).to_have_text("Name a colour.")
        row(page, "Tell me").click()
        expect(page.locator("#box .stop-button")).to_be_visible()
        page.locator("#box .stop-button").click()
        answered(page, 1)
        expect(busy).to_have_count(0)
        expect(page.get_by_test_id("user")).to_have_text(re.compile("Tell me"))
        page.close()


@pytest.mark.long
def test_a_document_is_read_and_asked_about_twice(
    embedded: Server, visitor: Visitor, tmp_path: Path
) -> None:
    pdf = tmp_path / "karsk.pdf"
    pdf.write_bytes(pdf_of(FACTS))
    page = visitor.open(embedded.address)
    page.locator("#box input[type=file]").set_input_files(pdf)
    page.locator("#box .thumbnail-item").wait_for()
    expect(page.get_by_role("group", name="karsk.pdf")).to_be_visible()
    # It is read while the question is typed.
    page.locator("#box textarea").fill("Who built")
    expect(page.locator("#chat").get_by_text("Read: karsk.pdf")).to_be_visible()
    expect(page.locator("#box textarea")).to_have_value("Who built")
    send(page, "Who built the lighthouse?")
    (answer,) = answered(page, 1)
    assert "Brandt" in answer
    expect(page.locator("#chat").get_by_text("About karsk.pdf")).to_be_visible()
    first = page.locator("#chat .source").first
    expect(first.locator("summary")).to_have_text("1 karsk.pdf, page 1")
    expect(first.locator("mark")).not_to_be_visible()
    first.locator("summary").press("Enter")
    expect(first.locator("mark")).to_be_in_viewport()
    expect(first.locator(".document")).to_contain_text("owns a grey donkey")
    assert first.locator("mark").inner_text() in FACTS
    first.locator("summary").click()
    expect(first.locator("mark")).not_to_be_visible()
    send(page, "In which year?")
    assert "1911" in answered(page, 2)[1]


@pytest.mark.long
def test_settings_are_priced_at_once_and_refused_in_a_sentence(
    server: Server, visitor: Visitor
) -> None:
    page = visitor.open(server.address)
    page.get_by_role("tab", name="Settings").click()
    verdict = page.locator("#price [data-peak]")
    expect(verdict).to_have_attribute("data-fits", "True")
    before = int(verdict.get_attribute("data-peak"))
    page.get_by_role("button", name="What it takes").click()
    page.locator("#plan-tokens input").fill("8000")
    waited(lambda: int(verdict.get_attribute("data-peak")) > before)

    expect(page.locator("#apply")).to_be_enabled()
    page.locator("#set-vram textarea, #set-vram input").fill("seven")
    refused = page.locator("#price [role=alert]")
    expect(refused).to_contain_text("'seven' is not a size")
    expect(page.locator("#apply")).to_be_disabled()
    page.locator("#set-vram textarea, #set-vram input").fill("10MB")
    expect(verdict).to_have_attribute("data-fits", "False")
    page.locator("#set-vram textarea, #set-vram input").fill("auto")
    expect(verdict).to_have_attribute("data-fits", "True")
    expect(page.locator("#apply")).to_be_enabled()

    page.get_by_role("radio", name="Least memory").check()
    expect(page.locator("#priority")).to_contain_text("Method spans: a tenth stays, in 4 bits")
    page.get_by_role("button", name="Cache and offloading").click()
    budget = page.locator("#set-budget textarea, #set-budget input")
    expect(budget).to_have_value("10%")
    budget.fill("12%")
    expect(page.locator("#priority")).to_contain_text("your own settings")
    budget.fill("10%")
    expect(page.get_by_role("radio", name="Least memory")).to_be_checked()


@pytest.mark.long
def test_settings_are_in_use_from_the_next_message_on(server: Server, visitor: Visitor) -> None:
    page = visitor.open(server.address)
    page.get_by_role("tab", name="Settings").click()
    most = page.locator("#set-max-new-tokens textarea, #set-max-new-tokens input")
    pending = page.locator("#pending, #unapplied").filter(has_text="Longest answer")
    most.fill("5")
    expect(pending).to_have_count(2)
    page.locator("#discard").click()
    expect(most).to_have_value("24")
    expect(pending).to_have_count(0)
    expect(page.locator("#discard")).not_to_be_visible()
    most.fill("5")
    page.locator("#new").click()
    expect(most).to_have_value("24")  # which begins as usual
    page.get_by_role("radio", name="Least memory").check()
    most.fill("3")
    expect(page.locator("#pending")).to_contain_text("Bits of what is kept")
    page.locator("#apply").click()
    expect(page.locator("#applied")).to_contain_text("Longest answer")
    expect(pending).to_have_count(0)
    again = visitor.open(page.url)
    looked_again(again)
    expect(again.locator("#unapplied p")).to_have_count(0)
    again.close()
    send(page, "Count to a hundred.")
    answered(page, 1)
    assert "cut at 3 tokens" in page.locator(ACCOUNT).inner_text()


# What is asked for is asked for once `release` is called.
HELD = """() => {
  const fetched = window.fetch, released = new Promise((done) => window.release = done);
  window.fetch = async (...what) => {
    await released;
    return fetched(...what);
  };
}"""


# Holds back the list of what is searched for, and says what lists are shown once it is let go.
LATE = """() => {
  const fetched = window.fetch, list = document.getElementById("listing");
  const late = window.late = { held: false, shown: [] };
  const let_go = new Promise((done) => late.come = () => {
    new MutationObserver(() => late.shown.push(list.innerText))
      .observe(list, { childList: true, subtree: true });
    done();
  });
  window.fetch = async (...what) => {
    const answer = await fetched(...what);
    if (!late.held && String(what[1]?.body).includes('"herons"')) {
      late.held = true;
      await let_go;
    }
    return answer;
  };
}"""


@pytest.mark.long
def test_a_message_sent_before_the_page_is_ready_is_not_lost(
    server: Server, visitor: Visitor
) -> None:
    page = visitor.open(server.address)
    held = list[Any]()
    page.route("**/queue/join*", lambda route: held.append(route))
    page.reload()
    page.locator("#box textarea").wait_for()
    while not held:
        page.wait_for_timeout(50)
    question = f"Where is {uuid4().hex[:8]}?"
    send(page, question)
    page.unroute("**/queue/join*")  # which lets them go
    expect(page.get_by_test_id("user")).to_have_text([question])
    expect(row(page, question)).to_have_attribute("aria-current", "true")
    answered(page, 1)


@pytest.mark.long
def test_the_list_is_searched_renamed_exported_and_shortened(
    tmp_path: Path, talker: Path, visitor: Visitor
) -> None:
    with serving(tmp_path, "--model", str(talker), "--max-tokens", "6") as server:
        page = visitor.open(server.address)
        send(page, "Where do herons live?")
        (answer,) = answered(page, 1)
        page.locator("#new").click()
        expect(page.locator(ANSWER)).to_have_count(0)
        send(page, "What do foxes eat?")
        answered(page, 1)
        listed = page.locator("#listing .open")
        expect(listed).to_have_text(["What do foxes eat?", "Where do herons live?"])

        search = page.locator("#search textarea, #search input")
        search.fill("zebra <b>")
        expect(page.get_by_text("No conversation has “zebra <b>”.")).to_be_visible()
        search.fill("heron")
        expect(page.get_by_text("No conversation has")).to_have_count(0)
        expect(page.locator("#listing .open")).to_have_count(1)
        row(page, "herons").click()
        expect(page.locator(ANSWER)).to_have_text(answer)
        send(page, "And owls?")
        answered(page, 2)
        expect(listed).to_have_text(["Where do herons live?"])  # what is searched for still

        # The list is one stop of the Tab key, and arrows go through it. What is drawn anew
        # meanwhile keeps the focus.
        page.evaluate(HELD)
        search.fill("")
        search.press("Tab")
        expect(row(page, "Where do herons live?")).to_be_focused()
        page.evaluate("window.release()")
        expect(listed).to_have_text(["Where do herons live?", "What do foxes eat?"])
        expect(row(page, "Where do herons live?")).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("user")).to_have_count(1)
        expect(row(page, "What do foxes eat?")).to_have_attribute("aria-current", "true")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
        page.keyboard.press("ArrowDown")
        with page.expect_download() as saved:
            page.keyboard.press("Enter")
        assert "What do foxes eat?" in Path(saved.value.path()).read_text(encoding="utf-8")
        assert saved.value.suggested_filename == "What do foxes eat_.md"

        choose(page, "Where do herons live?", "Rename")  # which is not the one that is shown
        page.locator("#rename-name").fill(" ")
        page.keyboard.press("Enter")
        expect(page.get_by_text("a conversation needs a name")).to_be_visible()
        page.evaluate(LATE)
        search.fill("herons")
        page.wait_for_function("window.late?.held")  # with the former name
        former = "Where do herons live?"
        for name in ("Egrets", "Herons & <b>others</b>"):
            choose(page, former, "Rename")
            page.locator("#rename-name").fill(name)
            page.get_by_role("button", name="Rename", exact=True).click()
            expect(row(page, name)).to_be_visible()
            page.evaluate("window.late.come()")  # the list that was asked for before the first
            former = name
        assert "Where do herons" not in "".join(page.evaluate("window.late.shown"))
        search.fill("")
        expect(listed).to_have_count(2)
        with page.expect_download() as saved:
            choose(page, "Herons & <b>others</b>", "Export as JSON")
        expect(page).to_have_title("What do foxes eat? · kvlite")  # which was not renamed
        plain = json.loads(Path(saved.value.path()).read_text(encoding="utf-8"))
        assert [each["text"].strip() for each in plain["said"]][1] == answer.strip()

        row(page, "Herons").click()
        expect(page.get_by_test_id("user")).to_have_count(2)
        choose(page, "Herons & <b>others</b>", "Delete")
        expect(page.get_by_test_id("user")).to_have_count(0)
        expect(page.locator("#listing .open")).to_have_text(["What do foxes eat?"])
        page.get_by_role("button", name="Undo", exact=True).click()
        expect(page.get_by_test_id("user")).to_have_count(2)
        expect(page.locator("#listing .open")).to_have_count(2)
        choose(page, "Herons & <b>others</b>", "Delete")
        expect(page.locator("#listing .open")).to_have_count(1)
        waited(lambda: len(list((tmp_path / "library").glob("*/record.json"))) == 1)

        page.close()
        assert server.end() == 0


def pdf_of(text: str) -> bytes:
    """A PDF of one page, as small as it can be."""
    lines = [line.replace("(", r"\(").replace(")", r"\)") for line in text.splitlines()]
    drawn = " ".join(f"({line}) Tj 0 -16 Td" for line in lines)
    stream = f"BT /F1 11 Tf 40 760 Td {drawn} ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = "%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{each}\nendobj\n"
    start = len(out)
    rows = "".join(f"{place:010} 00000 n \n" for place in places)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}"
    out += f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return out.encode("latin-1")
