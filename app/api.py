"""What programs may ask, with gradio's client."""

from collections.abc import Iterator
from typing import Any

import gradio as gr
from gradio.events import api

from kvlite.errors import SettingError
from kvlite.web.work import Shown, Work

from .engine.live import Live
from .engine.service import Service
from .tabs import owner_of
from .web.validation import refused
from .words import spoken


def for_programs(service: Service, live: Live) -> None:
    """Add the endpoints to a `gr.Blocks`."""

    def say(message: str, conversation: str, request: gr.Request) -> Iterator[str]:
        """Answer a message in a conversation, a new one if its id is "". Cancelling ends the
        answer; what has come of it stays."""
        owner, text = owner_of(request), message.strip()
        if not text:
            raise SettingError("the message is empty: say something")
        work = service.say(owner, id_of(owner, conversation), text)
        for shown in _until_left(work, service.host.pause):
            yield shown.text

    def read(file: dict[str, Any], conversation: str, request: gr.Request) -> Iterator[str]:
        """Read an uploaded document, into a new conversation if its id is ""; its id."""
        owner = owner_of(request)
        id = id_of(owner, conversation)
        path = str(file.get("path", "")) if isinstance(file, dict) else ""
        work = service.say(owner, id, "", [path])
        for _ in _until_left(work, service.host.pause):
            yield id

    def conversations(request: gr.Request) -> list[dict[str, Any]]:
        """All conversations of the user, the one used last first."""
        return [
            {"id": each.id, "name": each.title, "messages": len(each.said), "used": each.used}
            for each in service.store(owner_of(request)).records()
        ]

    def memory() -> list[dict[str, Any]]:
        """Where every byte is."""
        return [
            {
                "name": place.name,
                "total": place.total,
                "used": place.used,
                "parts": {part.name: part.nbytes for part in place.parts},
            }
            for place in live.look()[-1].places
        ]

    def id_of(owner: str, conversation: str) -> str:
        store = service.store(owner)
        return store.record(conversation).id if conversation else store.new().id

    api(say, api_name="say", concurrency_limit=None)
    api(read, api_name="read", concurrency_limit=None)
    api(conversations, api_name="conversations", queue=False)
    api(memory, api_name="memory", queue=False)


def _until_left(work: Work, pause: float) -> Iterator[Shown]:
    """What work shows; it ends when the one who asked for it leaves."""
    try:
        yield from work.follow(pause)
    finally:
        work.abandon()
    if work.failure is not None:
        raise refused(spoken(work.shown.error))
