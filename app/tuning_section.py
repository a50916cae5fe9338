"""The part of the settings that tunes them on a document."""

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from kvlite.bench.tune_grid import MINUTES

from .views.tuned import tuned_html

_ABOUT = (
    '<p class="note">Hides facts in the document and asks for them, with other methods and amounts '
    "kept, and looks how far predictions of its text move. Proposed is what takes the least memory "
    "and loses little.</p>"
)


class TuningSection:
    """Its components; made inside a `gr.Accordion`."""

    def __init__(self) -> None:
        gr.HTML(_ABOUT, padding=False)
        self.document = gr.Dropdown([], value=None, label="Document", elem_id="tune-document")
        self.minutes = gr.Number(
            MINUTES, label="Minutes it may take", minimum=0.1, elem_id="tune-minutes"
        )
        self.begin = gr.Button("Tune", size="sm", elem_id="tune-begin")
        self.found = gr.HTML(elem_id="tuned", padding=False, apply_default_css=False)
        self.use = gr.Button("Use what is proposed", size="sm", visible=False, elem_id="tuned-use")
        self.used = gr.HTML(elem_id="tuned-used", padding=False)

    @property
    def asked(self) -> list[Any]:
        """What it is told when it begins."""
        return [self.document, self.minutes]

    @property
    def view(self) -> list[Any]:
        """What changes with the conversation that is shown."""
        return [self.document, self.found, self.use, self.used]

    def updates(self, documents: Sequence[str], found: Mapping[str, Any]) -> dict[Any, Any]:
        """What it shows of a conversation.

        Args:
            documents: their names.
            found: what tuning has found, if it has been done.
        """
        return {
            self.document: gr.Dropdown(
                choices=[*documents], value=documents[-1] if documents else None
            ),
            self.found: tuned_html(found),
            self.use: gr.Button(visible=bool(found)),
            self.used: "",
        }
