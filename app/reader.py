"""What the page says and offers where a conversation was read by another model than is in use."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from kvlite.conversation.message import counted_tokens
from kvlite.errors import ContextError, KvliteError, SettingError, SnapshotError

from .engine.other_model import former_reader, price_of, return_to
from .engine.service import Service
from .form import Models
from .tabs import Tabs, owner_of
from .views.status import sentence_html, span, status_html


class ReaderBar:
    """Its components, above the message box."""

    def __init__(self) -> None:
        # Changes whenever there is something new to be priced.
        self.unpriced = gr.Textbox("", visible="hidden", elem_id="unpriced")
        with gr.Column(visible=False, elem_id="reader") as self.bar:
            self.told = gr.HTML(padding=False)
            with gr.Row():
                small: dict[str, Any] = {"size": "sm", "min_width": 60}
                self.again = gr.Button("Read again", elem_id="read-again", **small)
                self.stay = gr.Button("Stay", elem_id="stay", **small)

    @property
    def parts(self) -> list[Any]:
        """What changes with the conversation that is shown."""
        return [self.unpriced, self.bar, self.told, self.again, self.stay]

    def updates(self, service: Service, owner: str, id: str) -> dict[Any, Any]:
        """What it says of a conversation for which nothing is being done."""
        former = former_reader(service, owner, id)
        if former is None:
            return self.hidden()
        now, before = service.model_name, Path(former.model).name
        told = f"{before} has read this conversation. {now} reads it again with your next message."
        return {
            self.unpriced: f"{id} {service.host.settings.model}",
            self.bar: gr.Column(visible=True),
            self.told: _said(told),
            self.again: gr.Button(f"Read again with {now}", visible=True),
            self.stay: gr.Button(f"Stay with {before}"),
        }

    def hidden(self) -> dict[Any, Any]:
        """It while something is being done, or nothing is to be said."""
        return {self.unpriced: "", self.bar: gr.Column(visible=False)}


class ReaderEvents:
    """What happens in it."""

    def __init__(self, service: Service, bar: ReaderBar, models: Models, tabs: Tabs) -> None:
        self.service, self.bar, self.models, self.tabs = service, bar, models, tabs
        self._first = service.model_host.settings.model

    def price(self, unpriced: str, id: str, request: gr.Request) -> tuple[Any, Any]:
        """How many tokens are read again, and how long that takes; or why they cannot be."""
        nothing = gr.skip(), gr.skip()
        if not unpriced.startswith(f"{id} "):
            return nothing
        try:
            price = price_of(self.service, owner_of(request), id).wait()
        except (ContextError, SnapshotError) as error:
            return _said(f"{error}."), gr.Button(visible=False)
        except KvliteError:  # it is said once it is read
            return nothing
        if price is None or not self.tabs.shows(request.session_hash or "", id):
            return nothing
        now, tokens = self.service.model_name, counted_tokens(price.tokens)
        told = f"{now} reads this conversation again with your next message: {tokens}"
        return _said(f"{told}, about {span(max(1, price.seconds))}."), gr.skip()

    def stay(self, id: str, request: gr.Request) -> Iterator[str]:
        """Load the model that has read the conversation."""
        former = former_reader(self.service, owner_of(request), id)
        if former is None:
            return
        if not self.models.may_use(former.model, self._first):
            raise SettingError(
                f"{former.model} is not listed here: whoever runs the app can begin it with "
                f"--model {former.model}"
            )
        work = return_to(self.service, former)
        for shown in work.follow():
            yield status_html(shown)
        if work.failure is None:
            yield sentence_html(f"{Path(former.model).name} is in use again.")


def _said(text: str) -> str:
    return f'<p class="reader">{escape(text)}</p>'
