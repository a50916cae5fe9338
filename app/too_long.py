"""What the page offers where a message is too long for the model: never a dead end."""

from html import escape
from typing import Any

import gradio as gr

from kvlite.conversation.message import counted_tokens
from kvlite.errors import KvliteError

from .engine.parts import compacts, is_too_long, price_of_parts
from .engine.service import Service
from .tabs import Tabs, owner_of
from .views.status import span


class TooLongBar:
    """Its components, above the message box."""

    def __init__(self) -> None:
        # Changes whenever there is something new to be priced.
        self.unpriced = gr.Textbox("", visible="hidden", elem_id="parts-unpriced")
        with gr.Column(visible=False, elem_id="too-long") as self.bar:
            self.told = gr.HTML(padding=False)
            with gr.Row():
                small: dict[str, Any] = {"size": "sm", "min_width": 60}
                self.relevant = gr.Button(
                    "Read the most relevant parts", elem_id="read-parts", **small
                )
                self.compact = gr.Button("Compact", elem_id="compact", **small)

    @property
    def parts(self) -> list[Any]:
        """What changes with the conversation that is shown."""
        return [self.unpriced, self.bar, self.told, self.relevant, self.compact]

    def updates(self, service: Service, owner: str, id: str) -> dict[Any, Any]:
        """What it offers for a conversation for which nothing is being done."""
        work = service.work_for(owner, id)
        if work is None or service.host.beside or not is_too_long(work):
            return self.hidden()
        files = bool(work.request.documents)
        forgets = not files and compacts(service, owner, id, work.request.text)
        if not files and not forgets:
            return self.hidden()
        told = (
            "The parts that a text search finds for your question can be read."
            if files
            else "The conversation can go on with what its cache holds, and forget the rest."
        )
        return {
            self.unpriced: f"{id} {service.host.settings.model} {work.shown.since}"
            if files
            else "",
            self.bar: gr.Column(visible=True),
            self.told: _said(told),
            self.relevant: gr.Button(visible=files),
            self.compact: gr.Button(visible=forgets),
        }

    def hidden(self) -> dict[Any, Any]:
        """It while something is being done, or nothing is too long."""
        return {self.unpriced: "", self.bar: gr.Column(visible=False)}


class TooLongEvents:
    """What happens in it, beside what is sent."""

    def __init__(self, service: Service, tabs: Tabs) -> None:
        self.service, self.tabs = service, tabs

    def price(self, unpriced: str, id: str, request: gr.Request) -> Any:
        """How many tokens the parts have, and how long reading them takes."""
        if not unpriced.startswith(f"{id} "):
            return gr.skip()
        try:
            price = price_of_parts(self.service, owner_of(request), id).wait()
        except KvliteError:  # it is said once they are read
            return gr.skip()
        if price is None or not self.tabs.shows(request.session_hash or "", id):
            return gr.skip()
        return _said(
            "The parts that a text search finds for your question can be read: at most "
            f"{counted_tokens(price.tokens)}, about {span(max(1, price.seconds))}."
        )


def _said(text: str) -> str:
    return f'<p class="reader">{escape(text)}</p>'
