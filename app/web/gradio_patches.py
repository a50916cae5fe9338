"""Keeps gradio from taking the engine's time while nothing happens, from false alarms, and from
losing events."""

from pathlib import Path

import gradio as gr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEAD = b"<head>"
_SCRIPTS = ("frames.js", "labels.js", "leaving.js", "list.js", "stream.js", "page.js")
# Seconds between two looks of the queue at what is asked, and at how far that is.
_LISTEN, _REPORT = 0.02, 0.1


def poll_queue_slowly(page: gr.Blocks) -> None:
    """Have a page's queue look for events fifty times a second, not a thousand times."""
    page._queue.sleep_when_free = _LISTEN
    page._queue.progress_update_sleep_when_free = _REPORT


def script(name: str) -> str:
    """What has the browser call a function of `page.js`."""
    return f"(...given) => kvlite.{name}(...given)"


class ScriptInjector:
    """Puts scripts into the page, before all of gradio's own: each says why."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        texts = [Path(__file__).with_name(name).read_bytes() for name in _SCRIPTS]
        self._head = _HEAD + b"".join(b"<script>" + text + b"</script>" for text in texts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a page is sent once it is whole, for its length is told first."""
        start: Message | None = None
        page = bytearray()

        async def sent(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_page(message):
                start = message
            elif start is None:
                await send(message)
            else:
                page.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    whole = bytes(page).replace(_HEAD, self._head, 1)
                    await send(_of_length(start, len(whole)))
                    await send({"type": "http.response.body", "body": whole})

        await self.app(scope, receive, sent)


def _is_page(start: Message) -> bool:
    kind: bytes = dict(start.get("headers", ())).get(b"content-type", b"")
    return kind.startswith(b"text/html")


def _of_length(start: Message, length: int) -> Message:
    headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", str(length).encode())]}
