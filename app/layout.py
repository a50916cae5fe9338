"""What the page has, and where."""

from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from kvlite.config.settings import OPTIONS, Settings

from .engine.uploads import SUFFIXES
from .form import ANSWER, FIRST, Models, control, shown_values

# Characters that may be pasted before gradio makes a file of them.
_PASTE = 1_000_000
ANSWER_TAB = "answer"
_LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]


@dataclass
class Parts:
    """The page's components, by what they are for."""

    # What is shown is the browser's to know: an event is about what was shown when it happened, and
    # what gradio calls a state would be what is shown once it is heard.
    here: gr.Textbox
    chosen: gr.Number
    start: gr.Number
    kept_here: gr.BrowserState
    stage: gr.State
    filled: gr.State
    # The list of conversations.
    new: gr.Button = field(init=False)
    search: gr.Textbox = field(init=False)
    listing: gr.Radio = field(init=False)
    name: gr.Textbox = field(init=False)
    delete: gr.Button = field(init=False)
    delete_now: gr.Button = field(init=False)
    markdown: gr.Button = field(init=False)
    json: gr.Button = field(init=False)
    export: gr.Textbox = field(init=False)
    export_name: gr.Textbox = field(init=False)
    # The conversation.
    branches: gr.Dropdown = field(init=False)
    earlier: gr.Button = field(init=False)
    chat: gr.Chatbot = field(init=False)
    status: gr.HTML = field(init=False)
    box: gr.MultimodalTextbox = field(init=False)
    # Beside it.
    clock: gr.Timer = field(init=False)
    side: gr.Tabs = field(init=False)
    live: gr.HTML = field(init=False)
    answer: gr.HTML = field(init=False)
    check: gr.Button = field(init=False)
    end_check: gr.Button = field(init=False)
    fork: gr.Button = field(init=False)
    difference: gr.HTML = field(init=False)
    tokens: gr.Number = field(init=False)
    phases: gr.HTML = field(init=False)
    estimate: gr.HTML = field(init=False)
    apply: gr.Button = field(init=False)
    applied: gr.HTML = field(init=False)
    profiles: gr.Dropdown = field(init=False)
    profile_name: gr.Textbox = field(init=False)
    save_profile: gr.Button = field(init=False)
    delete_profile: gr.Button = field(init=False)
    controls: dict[str, Any] = field(default_factory=dict)

    @property
    def ordered(self) -> list[Any]:
        """The controls, in the order of the settings."""
        return [self.controls[name] for name in OPTIONS]

    @property
    def view(self) -> list[Any]:
        """What changes when another conversation is shown, or this one has gone on."""
        return [
            self.here,
            self.kept_here,
            self.start,
            self.stage,
            self.earlier,
            self.chat,
            self.status,
            self.box,
            self.branches,
            self.listing,
            self.name,
            self.chosen,
            self.answer,
            self.difference,
        ]


def lay_out(settings: Settings, models: Models) -> Parts:
    """Make the page, inside a `gr.Blocks`."""
    # With a secret of its own every start would forget which one a browser had open.
    kept_here = gr.BrowserState("", storage_key="kvlite-conversation", secret="kvlite")
    here = gr.Textbox("", visible="hidden", elem_id="here")
    chosen, start = (gr.Number(0, precision=0, visible="hidden") for _ in range(2))
    filled = gr.State(shown_values(settings))
    parts = Parts(here, chosen, start, kept_here, gr.State(""), filled)
    with gr.Sidebar(label="Conversations", width=280, elem_id="conversations"):
        _conversations(parts)
    with gr.Column(elem_id="middle"):
        _conversation(parts)
    with gr.Sidebar(label="Memory, answer, settings", position="right", width=430, elem_id="side"):
        parts.side = gr.Tabs()
        with parts.side:
            with gr.Tab("Memory", id="memory", elem_id="tab-memory"):
                parts.live = gr.HTML(elem_id="live", padding=False)
            with gr.Tab("Answer", id=ANSWER_TAB, elem_id="tab-answer"):
                _answer(parts)
            with gr.Tab("Settings", id="settings", elem_id="tab-settings"):
                _settings(parts, settings, models)
    parts.clock = gr.Timer(1.0)
    return parts


def _conversations(parts: Parts) -> None:
    parts.new = gr.Button("New conversation", variant="primary", elem_id="new", size="md")
    with gr.Accordion("This conversation", open=False, elem_id="manage"):
        parts.name = gr.Textbox(label="Name", elem_id="name", submit_btn="Rename", max_length=200)
        with gr.Row():
            parts.markdown = gr.Button(
                "Export Markdown", size="sm", min_width=60, elem_id="export-markdown"
            )
            parts.json = gr.Button("Export JSON", size="sm", min_width=60, elem_id="export-json")
        parts.delete = gr.Button("Delete", variant="stop", size="sm", elem_id="delete")
        parts.delete_now = gr.Button("Delete now", visible="hidden", elem_id="delete-now")
        parts.export = gr.Textbox(visible="hidden", elem_id="export-text")
        parts.export_name = gr.Textbox(visible="hidden", elem_id="export-name")
    parts.search = gr.Textbox(
        label="Search", placeholder="Search", show_label=False, elem_id="search", container=False
    )
    parts.listing = gr.Radio(
        [], label="Conversations", show_label=False, elem_id="listing", container=False
    )


def _conversation(parts: Parts) -> None:
    parts.branches = gr.Dropdown(
        [], label="Branch", visible=False, elem_id="branches", interactive=True
    )
    parts.earlier = gr.Button("Show earlier messages", visible=False, size="sm", elem_id="earlier")
    parts.chat = gr.Chatbot(
        label="Conversation",
        show_label=False,
        elem_id="chat",
        editable="user",
        allow_tags=False,
        sanitize_html=True,
        latex_delimiters=_LATEX,
        buttons=["copy"],
        allow_file_downloads=False,
        layout="bubble",
        placeholder=(
            "### Ask anything, or drop in a document\n"
            "Whatever is set aside is kept in host memory, and recalled for the question it is "
            "needed for."
        ),
    )
    parts.status = gr.HTML(elem_id="status", padding=False)
    parts.box = gr.MultimodalTextbox(
        label="Message",
        show_label=False,
        placeholder="Message, or drop a document",
        file_types=list(SUFFIXES),
        file_count="multiple",
        sources=["upload"],
        max_plain_text_length=_PASTE,
        elem_id="box",
        autofocus=True,
        submit_btn=True,
        stop_btn=False,
    )


def _answer(parts: Parts) -> None:
    with gr.Row():
        parts.check = gr.Button("Check the last answer", size="sm", elem_id="check")
        parts.end_check = gr.Button("Stop checking", size="sm", elem_id="end-check", min_width=60)
        parts.fork = gr.Button("Branch from this one", size="sm", elem_id="fork")
    parts.difference = gr.HTML(elem_id="difference", padding=False)
    parts.answer = gr.HTML(elem_id="answer", padding=False)


def _settings(parts: Parts, settings: Settings, models: Models) -> None:
    parts.tokens = gr.Number(
        4096,
        label="Tokens to plan for",
        info="a page of text has about 500",
        minimum=1,
        precision=0,
        elem_id="plan-tokens",
    )
    parts.phases = gr.HTML(elem_id="phases", padding=False)
    for name in (*FIRST, *ANSWER):
        parts.controls[name] = control(name, getattr(settings, name), models)
    for panel in ("Model and memory", "Answer"):
        with gr.Accordion(f"More: {panel.lower()}", open=False):
            for name, option in OPTIONS.items():
                if option.metadata["panel"] == panel and name not in parts.controls:
                    parts.controls[name] = control(name, getattr(settings, name), models)
    with gr.Accordion("Profiles", open=False):
        parts.profiles = gr.Dropdown([], value=None, label="Take settings from", elem_id="profiles")
        parts.profile_name = gr.Textbox(
            label="Save these settings as", elem_id="profile-name", max_length=64
        )
        with gr.Row():
            parts.save_profile = gr.Button("Save", size="sm", elem_id="save-profile")
            parts.delete_profile = gr.Button(
                "Delete the one chosen", size="sm", variant="stop", elem_id="delete-profile"
            )
    with gr.Column(elem_id="apply-bar"):  # in sight however far one has gone down
        parts.estimate = gr.HTML(elem_id="price", padding=False)
        parts.apply = gr.Button("Apply", variant="primary", elem_id="apply")
        parts.applied = gr.HTML(elem_id="applied", padding=False)
