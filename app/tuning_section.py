"""The part of the settings that tunes them on a document."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import gradio as gr

from kvlite.bench.options import NO_RECALL, TUNE_MINUTES

from .form import label_of

_ABOUT = (
    '<p class="note">Hides facts in the document and asks for them, with other methods and amounts '
    "kept, and looks how far predictions of its text move. Proposed is what takes the least memory "
    "and loses little.</p>"
)

# Columns of `kvlite tune`, in the words of the page.
_COLUMNS = {
    "method": "Method",
    "budget": "Keeps",
    "KV": "Memory",
    "facts known": "Facts",
    "nats lost": "Lost",
    "ms a token": "ms a token",
}


class TuningSection:
    """Its components; made inside a `gr.Accordion`."""

    def __init__(self) -> None:
        gr.HTML(_ABOUT, padding=False)
        self.document = gr.Dropdown([], value=None, label="Document", elem_id="tune-document")
        self.minutes = gr.Number(
            TUNE_MINUTES, label="Minutes it may take", minimum=0.1, elem_id="tune-minutes"
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
        """What it shows of a conversation: the names of its documents, and what tuning has found,
        if it has been done."""
        return {
            self.document: gr.Dropdown(
                choices=[*documents], value=documents[-1] if documents else None
            ),
            self.found: tuned_html(found),
            self.use: gr.Button(visible=bool(found)),
            self.used: "",
        }


def tuned_html(found: Mapping[str, Any]) -> str:
    """The settings that are proposed, why, and what no other choice beats; "" if there are none."""
    if not found:
        return ""
    values = "".join(
        f"<tr><th scope=row>{escape(label_of(name))}</th><td>{escape(str(value))}</td></tr>"
        for name, value in found["values"].items()
    )
    head = "".join(f"<th scope=col>{escape(each)}</th>" for each in _COLUMNS.values())
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(line, name))}</td>' for name in _COLUMNS)}</tr>"
        for line in found["lines"]
    )
    return (
        f'<div class="account"><h3>Proposed for {escape(found["brief"])}</h3>'
        f"<table>{values}</table><p>{escape(found['told'][0])}</p>"
        "<details><summary>What was measured</summary>"
        "<p>What no other choice beats both in memory and in what it loses. Facts: the hidden "
        "ones that it knows. Lost: nats a token, beside keeping everything.</p>"
        f'<table class="measured"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        "</details></div>"
    )


def _cell(line: Mapping[str, str], name: str) -> str:
    recall = line["recall"] if name == "method" else NO_RECALL
    return line[name] + ("" if recall == NO_RECALL else f", recall {recall}")
