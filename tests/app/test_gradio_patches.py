"""What keeps gradio from taking the engine's time."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

import kvlite_app.web.gradio_patches
from kvlite_app.web.gradio_patches import ScriptInjector, poll_queue_slowly
from tests.app.conftest import SLOW, Server, Visitor, waited

FOLDER = Path(kvlite_app.web.gradio_patches.__file__).parent
SCRIPT, *OTHERS = (
    (FOLDER / name).read_text()
    for name in ("frames.js", "labels.js", "leaving.js", "list.js", "stream.js", "page.js")
)
PAGE = "<html><head><title>kvlite</title></head><p>a &lt;head&gt;</p></html>"
COUNTED = """
const ask = window.requestAnimationFrame.bind(window);
window.asked = 0;
window.requestAnimationFrame = (draw) => { window.asked += 1; return ask(draw); };
"""


async def pages(scope: Scope, receive: Receive, send: Send) -> None:
    half = len(PAGE) // 2
    answers = {
        "/": HTMLResponse(PAGE),
        "/streamed": StreamingResponse(iter([PAGE[:half], PAGE[half:]]), media_type="text/html"),
        "/text": PlainTextResponse(PAGE),
    }
    await answers[scope["path"]](scope, receive, send)


@pytest.mark.parametrize("path", ["/", "/streamed"])
def test_a_page_has_the_scripts_before_all_others(path: str) -> None:
    answer = TestClient(ScriptInjector(pages)).get(path)
    scripts = "".join(f"<script>{each}</script>" for each in (SCRIPT, *OTHERS))
    ahead = f"<head>{scripts}"
    assert answer.text == PAGE.replace("<head>", ahead, 1)
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.long
def test_a_page_that_is_only_open_is_not_drawn_again_and_again(
    server: Server, visitor: Visitor
) -> None:
    visitor.context.add_init_script(COUNTED)
    page = visitor.open(server.address)

    def asked() -> int:
        page.evaluate("window.asked = 0; requestAnimationFrame(() => {})")
        page.wait_for_timeout(3000)
        return int(page.evaluate("window.asked"))

    waited(lambda: 0 < asked() < 30)  # of 180, once all of it is there


FRAMES = """() => new Promise((done) => {
  const drawn = {clock: 0, ended: 0, late: 0, chart: 0}, begun = performance.now();
  const ended = requestAnimationFrame(() => { drawn.ended = (performance.now() - begun) / 1e3; });
  cancelAnimationFrame(ended);
  requestAnimationFrame(() => { drawn.clock = (performance.now() - begun) / 1000; });
  const plain = requestAnimationFrame(() => { drawn.late += 1; });
  cancelAnimationFrame(plain);
  const chart = (now) => {
    drawn.chart += performance.now() - begun > 0;
    if (drawn.chart < 20 && (performance.now() - begun) / 1000 < 30) requestAnimationFrame(chart);
  };
  requestAnimationFrame(chart);
  const over = () => {
    const slow = drawn.chart < 20 && performance.now() - begun < 30_000;
    slow ? setTimeout(over, 500) : done(drawn);
  };
  setTimeout(over, 5500);
})"""


@pytest.mark.long
def test_a_frame_can_be_cancelled_and_what_moves_is_not_slowed(chromium: Any) -> None:
    page = chromium.new_page()
    page.set_content(f"<script>{SCRIPT}</script>")
    drawn = page.evaluate(FRAMES)
    page.close()
    assert drawn["clock"] >= 1
    assert drawn["ended"] == drawn["late"] == 0
    assert drawn["chart"] == 20  # slowed, there would be three a second


# The last message of a stream, which says that it is closed, comes once `letClose` is called.
CLOSES_LATE = """
const fetched = window.fetch.bind(window);
window.closing = false;
const closed = new Promise((done) => window.letClose = done);
window.fetch = async (...request) => {
  const response = await fetched(...request);
  if (!String(request[0]?.url ?? request[0]).includes('queue/data')) return response;
  const late = new TransformStream({
    async transform(chunk, controller) {
      const text = new TextDecoder().decode(chunk);
      const [before, ...close] = text.split(/(?=data:[^\\n]*close_stream)/);
      controller.enqueue(new TextEncoder().encode(before));
      if (!close.length) return;
      window.closing = true;
      await closed;
      controller.enqueue(new TextEncoder().encode(close.join('')));
    },
  });
  return new Response(response.body.pipeThrough(late), response);
};
"""


@pytest.fixture
def counting() -> Iterator[str]:
    """Where a page is served whose button counts how often it was clicked."""
    with gr.Blocks(analytics_enabled=False) as page:
        count = gr.Number(0, label="count")
        gr.Button("One more").click(lambda number: number + 1, count, count)
    injected = {"middleware": [Middleware(ScriptInjector)]}
    _, address, _ = page.launch(
        prevent_thread_lock=True, quiet=True, ssr_mode=False, _frontend=False, app_kwargs=injected
    )
    yield address
    page.close(verbose=False)


@pytest.mark.long
def test_a_click_while_the_stream_closes_is_answered(chromium: Any, counting: str) -> None:
    from playwright.sync_api import TimeoutError as TooLate
    from playwright.sync_api import expect

    page = chromium.new_page()
    page.set_default_timeout(SLOW)
    page.add_init_script(CLOSES_LATE)
    page.goto(counting)
    button, count = page.get_by_role("button", name="One more"), page.get_by_label("count")
    clicks = 0
    while not page.evaluate("window.closing"):  # the page may close a stream before the server does
        clicks += 1
        button.click()
        expect(count).to_have_value(str(clicks))
        with suppress(TooLate):
            page.wait_for_function("window.closing", timeout=2_000)
    with page.expect_response(lambda response: "queue/join" in response.url):
        button.click()
    page.evaluate("window.letClose()")
    expect(count).to_have_value(str(clicks + 1))
    button.click()  # which opens another stream
    expect(count).to_have_value(str(clicks + 2))
    page.close()


def test_the_queue_listens_less_often() -> None:
    with gr.Blocks(analytics_enabled=False) as page:
        page.queue()
    before = page._queue.sleep_when_free, page._queue.progress_update_sleep_when_free
    poll_queue_slowly(page)
    assert page._queue.sleep_when_free > before[0]
    assert page._queue.progress_update_sleep_when_free > before[1]
