"""The app as people run it, and a browser that tells of every request and error."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from gradio_client import Client
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlite.config.settings import EMBEDDED_MODEL, Settings
from kvlite.model.source import find_model
from kvlite_app.engine.service import Service
from tests.cli.conftest import model_of

T = TypeVar("T")

ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
# Milliseconds: a machine that does other things answers slowly.
SLOW = 180_000
# Failures of what was waited for in a browser.
WAITED = ["TimeoutError", "AssertionError: Locator", "AssertionError: Page"]
# Answers, and the line under each.
ANSWER = "#chat [data-testid=bot]:not(:has(.thought-group, .sources))"
ACCOUNT = "#chat [data-testid=bot]:has(.thought-group):has-text('first token')"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What drives a browser may be tried once more where it waited in vain, as on a busy machine
    one is late now and then; pytest's summary names what was."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=WAITED))


@dataclass
class Server:
    """A running app.

    Attributes:
        data: its data folder.
    """

    address: str
    process: subprocess.Popen[str]
    data: Path

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """End it; its exit code."""
        self.process.send_signal(how)
        return self.process.wait(120)


@contextmanager
def serving(data: Path, *args: str, config: Path | None = None) -> Iterator[Server]:
    """The app in a process of its own, on the embedded model unless another is given."""
    changes = {
        "KVLITE_DATA": str(data),
        "KVLITE_CONFIG": str(config or data / "config"),
        "HF_HUB_OFFLINE": "1",
    }
    # Any free port; two tests may look for one at once.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    port = 20_000 + 2_000 * worker + os.getpid() % 1_000
    command = [sys.executable, "-m", "kvlite", "app", "--port", str(port), *args]
    process = subprocess.Popen(command, env=os.environ | changes, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if "kvlite is at " in line:
                break
        assert said and "kvlite is at" in said[-1], "".join(said)
        address = said[-1].split("kvlite is at ")[1].split()[0].rstrip("/")
        # What it says later must not fill the pipe, and is shown beside a test that fails.
        rest = threading.Thread(target=lambda: print(process.stderr.read()), daemon=True)
        rest.start()
        yield Server(address, process, data)
    finally:
        if process.poll() is None:
            process.kill()
        print(f"the app ended with {process.wait()}")


def client(server: Server, **given: Any) -> Client:
    """A program that asks it, and is patient."""
    patient = {"timeout": SLOW / 1000}
    return Client(
        server.address, verbose=False, analytics_enabled=False, httpx_kwargs=patient, **given
    )


@pytest.fixture
def given(tiny_folder: Path) -> Settings:
    return Settings(model=str(tiny_folder), max_new_tokens=4)


@pytest.fixture
def service(given: Settings, tmp_path: Path) -> Iterator[Service]:
    service = Service(given, tmp_path)
    yield service
    service.close()


@pytest.fixture(scope="package")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that says words, fast, and never ends an answer by itself."""
    folder = model_of(tmp_path_factory.mktemp("talker"), 100_000)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = " the sea light house storm ship wind keeper rock wave night far bell and lamp"
    head = model.lm_head.weight.data
    said = tokenizer.encode(words, add_special_tokens=False)
    kept = head[said].clone()
    head.zero_()
    head[said] = kept
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, talker: Path) -> Iterator[Server]:
    """One for all tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("app")
    with serving(folder, "--model", str(talker), "--max-tokens", "24") as server:
        yield server


@pytest.fixture(scope="package")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Likewise, on the embedded model, which knows what a document says."""
    find_model(EMBEDDED_MODEL)  # which takes its time, once
    with serving(tmp_path_factory.mktemp("embedded"), "--max-tokens", "24") as server:
        yield server


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """A browser; where there must be one, its absence is an error."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        assert not os.environ.get("CI"), "no Chromium: make browser installs it"
        pytest.skip("no Chromium here: make browser installs it")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=SLOW)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*ARGS])
        yield browser
        browser.close()


@dataclass
class Visitor:
    """Someone with a browser of their own, and what it complained of.

    Attributes:
        outside: addresses elsewhere that it was asked for.
        errors: of the page.
        events: what its pages asked the app to do, and how that was answered.
    """

    context: Any
    outside: list[str]
    errors: list[str]
    events: list[str] = field(default_factory=list)

    def open(self, address: str, ready: str = "#live .place") -> Any:
        """Another tab, once it has what is `ready` last."""
        from playwright.sync_api import expect

        page = self.context.new_page()
        page.set_default_timeout(SLOW)
        page.on("request", lambda request: self._requested(request, address))
        page.on("response", lambda response: self._answered(response))
        page.on("requestfailed", lambda request: self._note("failed", request))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )
        page.goto(address)
        page.locator("#box textarea").wait_for()
        page.locator(ready).first.wait_for()
        expect(page.locator("#here textarea, #here input")).not_to_have_value("")
        return page

    def _requested(self, request: Any, address: str) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(address).netloc:
            self.outside.append(request.url)
        self._note("asked", request)

    def _answered(self, response: Any) -> None:
        self._note(str(response.status), response.request)

    def _note(self, what: str, request: Any) -> None:
        if "/gradio_api/" in request.url:
            sent = (request.post_data or "")[:300] if what == "asked" else ""
            path = request.url.split("/gradio_api/")[1]
            self.events.append(f"{time.monotonic():.2f} {what} {path} {sent}")


@pytest.fixture
def visitor(chromium: Any) -> Iterator[Visitor]:
    """Afterwards no request has left the machine, and no page has complained."""
    context = chromium.new_context(
        viewport={"width": 1400, "height": 900}, accept_downloads=True, reduced_motion="reduce"
    )
    visitor = Visitor(context, [], [])
    yield visitor
    print(
        "\n".join(each for each in visitor.events if '"fn_index":' in each or "asked" not in each)[
            -20000:
        ]
    )
    context.close()
    assert visitor.outside == []
    assert visitor.errors == []


def upload(service: Service, name: str, content: bytes, owner: str = "") -> str:
    """Where a file lies that someone uploaded."""
    path = service.uploads.new(owner) / name
    path.write_bytes(content)
    return str(path)


def send(page: Any, text: str) -> None:
    """Say something."""
    page.locator("#box textarea").fill(text)
    page.locator("#box textarea").press("Enter")


def answered(page: Any, count: int) -> list[str]:
    """The answers, once there are so many, and nothing is being done."""
    from playwright.sync_api import expect

    expect(page.locator(ACCOUNT)).to_have_count(count)
    expect(page.locator(ANSWER)).to_have_count(count)
    expect(page.locator("#box .stop-button")).to_have_count(0)
    found: list[str] = []

    def all_there() -> bool:  # the chat may be drawn anew in between
        found[:] = page.locator(ANSWER).all_inner_texts()
        return len(found) == count

    waited(all_there)
    return found


def waited(holds: Any, seconds: float = SLOW / 1000) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.1)


def awaited(work: Coroutine[Any, Any, T]) -> T:
    """What it comes to, in a thread of its own: a browser's tests leave a loop running in this."""
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(asyncio.run, work).result()
