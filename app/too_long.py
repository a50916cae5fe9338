"""What the page offers where a message is too long for the model: never a dead end."""

import time
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from kvlite.config.units import readable
from kvlite.conversation.message import counted_tokens
from kvlite.errors import KvliteError, SettingError
from kvlite.model.local_models import models_here

from .engine.parts import compacts, is_too_long, longer_model, price_of_parts
from .engine.service import Service
from .form import Models
from .tabs import Tabs, owner_of
from .views.status import span, status_html


class TooLongBar:
    """Its components, above the message box."""

    def __init__(self) -> None:
        # The model that `use` takes.
        self.longer = gr.Textbox("", visible="hidden")
        # Changes whenever this is drawn anew, without prices.
        self.unpriced = gr.Textbox("", visible="hidden", elem_id="parts-unpriced")
        with gr.Column(visible=False, elem_id="too-long") as self.bar:
            self.told = gr.HTML(padding=False)
            with gr.Row():
                small: dict[str, Any] = {"size": "sm", "min_width": 60}
                self.relevant = gr.Button(
                    "Read the most relevant parts", elem_id="read-parts", **small
                )
                self.use = gr.Button("Use it", elem_id="use-longer", **small)
                self.compact = gr.Button("Compact", elem_id="compact", **small)

    @property
    def parts(self) -> list[Any]:
        """What changes with the conversation that is shown."""
        return [self.unpriced, self.bar, self.told, self.relevant, self.use, self.compact]

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
            self.unpriced: f"{id} {time.monotonic()}" if files else "",
            self.bar: gr.Column(visible=True),
            self.told: _said(told),
            self.relevant: gr.Button(visible=files),
            self.use: gr.Button(visible=False),
            self.compact: gr.Button(visible=forgets),
        }

    def hidden(self) -> dict[Any, Any]:
        """It while something is being done, or nothing is too long."""
        return {self.unpriced: "", self.bar: gr.Column(visible=False)}


class TooLongEvents:
    """What happens in it, beside what is sent."""

    def __init__(self, service: Service, bar: TooLongBar, models: Models, tabs: Tabs) -> None:
        self.service, self.bar, self.models, self.tabs = service, bar, models, tabs
        self._first = service.model_host.settings.model

    def price(self, unpriced: str, id: str, request: gr.Request) -> Iterator[dict[Any, Any]]:
        """How many tokens the parts have, and how long reading them takes; then a model that takes
        all, if this machine has one."""
        bar, owner = self.bar, owner_of(request)
        work = self.service.work_for(owner, id)
        told, nothing = "", {bar.told: gr.skip()}
        if not unpriced.startswith(f"{id} ") or work is None:
            yield nothing
            return
        with suppress(KvliteError):  # it is said once they are read
            price = price_of_parts(self.service, owner, id).wait()
            if price is not None:
                told = (
                    "The parts that a text search finds for your question can be read: at most "
                    f"{counted_tokens(price.tokens)}, about {span(max(1, price.seconds))}."
                )
        yield {bar.told: _said(told)} if told and self._shows(id, request) else nothing
        longer = longer_model(self.service, work, self.models, self._first)
        if longer is None or not self._shows(id, request):
            yield nothing
            return
        name = Path(longer.name).name
        told += (
            f" {name} takes all {counted_tokens(longer.tokens)}, with {readable(longer.nbytes)} of "
            "memory, once it is loaded."
        )
        use = gr.Button(f"Use {name}", visible=True)
        yield {bar.told: _said(told.strip()), bar.use: use, bar.longer: longer.name}

    def use(self, name: str, id: str, request: gr.Request) -> Iterator[str]:
        """Load the model that takes all; the message is sent once it is there."""
        listed = name in (each.name for each in models_here())
        if not listed or not self.models.may_use(name, self._first):
            raise SettingError("that model is not here any more: choose another under Models")
        work = self.service.load(self.service.host.settings.replace({"model": name}))
        for shown in work.follow():
            yield status_html(shown)
        if work.failure is not None:
            raise work.failure

    def _shows(self, id: str, request: gr.Request) -> bool:
        return self.tabs.shows(request.session_hash or "", id)


def _said(text: str) -> str:
    return f'<p class="reader">{escape(text)}</p>'
