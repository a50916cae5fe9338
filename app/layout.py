"""The page's components, and where they are."""

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components.chatbot import ExampleMessage

from kvlite.bench.prose import bundled_prose
from kvlite.config.settings import OPTIONS, Settings

from .estimate import PLANNED
from .form import ANSWER, FIRST, FOLDED, Models, control, shown_values
from .models_tab import MODELS_TAB, ModelsTab
from .priorities import PRIORITIES, about, priority_of
from .reader import ReaderBar
from .too_long import TooLongBar
from .views.listing import ACTIONS, MENU_HTML
from .web.gradio_patches import script

# Characters that may be pasted before gradio makes a document of them.
_PASTE = 2_000
ANSWER_TAB, SETTINGS_TAB = "answer", "settings"
_LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]

# What a first visitor may click: a document and a question, a chat, and what fits here.
DOCUMENT = "constitution.txt"
_AFTER_IT = "\n\nAmendments\n"

QUESTION = "What is the term of office of the President?"
CHAT = "Explain in three sentences why the sky is blue."
# As gradio's chat takes them. The last one only shows the settings, with their plan.
EXAMPLES: list[ExampleMessage] = [
    {"text": QUESTION, "display_text": f"Ask a 20-page document: {QUESTION}"},
    {"text": CHAT, "display_text": f"Chat: {CHAT}"},
    {"text": "", "display_text": "See what fits this machine"},
]


def sample_document() -> str:
    """The Constitution of the United States without its amendments, some 6,000 tokens."""
    text = bundled_prose()
    return text[: text.index(_AFTER_IT)]


class Parts:
    """The page's components, by what they are for; made inside a `gr.Blocks`."""

    def __init__(self, settings: Settings, models: Models) -> None:
        # The browser knows what it shows, and says so with each event. A gr.State would be what it
        # shows when the server hears of the event.
        self.here = gr.Textbox("", visible="hidden", elem_id="here")
        self.chosen = gr.Number(0, precision=0, visible="hidden")
        self.start = gr.Number(0, precision=0, visible="hidden")
        # Name and size of a .gguf that is dropped on the page, which a script fills in.
        offered: Any = "hidden" if models.here and models.others else False
        self.dropped = gr.Textbox("", visible=offered, elem_id="model-dropped")
        # With a random secret every start would forget which conversation a browser had open.
        self.kept_here = gr.BrowserState("", storage_key="kvlite-conversation", secret="kvlite")
        self.stage = gr.State("")
        self.filled = gr.State(shown_values(settings))
        self.controls: dict[str, Any] = {}
        with gr.Sidebar(label="Conversations", width=280, elem_id="conversations"):
            self._conversations()
        with gr.Column(elem_id="middle"):
            gr.HTML('<h1 class="sr-only">kvlite</h1>', padding=False, apply_default_css=False)
            self.model = gr.Button(
                Path(settings.model).name, size="sm", variant="secondary", elem_id="model"
            )
            self._conversation(models)
        with gr.Sidebar(
            label="Memory, answer, settings",
            position="right",
            width="min(430px, 45vw)",
            elem_id="side",
        ):
            self.side = gr.Tabs(selected="memory" if models.here else ANSWER_TAB)
            with self.side:
                with gr.Tab("Memory", id="memory", elem_id="tab-memory", visible=models.here):
                    self.live = gr.HTML(elem_id="live", padding=False)
                with gr.Tab("Answer", id=ANSWER_TAB, elem_id="tab-answer"):
                    self._answer(models)
                with gr.Tab(
                    "Models", id=MODELS_TAB, elem_id="tab-models", visible=models.here
                ) as self.models_tab:
                    self.models = ModelsTab(models)
                with gr.Tab(
                    "Settings", id=SETTINGS_TAB, elem_id="tab-settings"
                ) as self.settings_tab:
                    self._settings(settings, models)
        self.clock = gr.Timer(1.0)

    @property
    def ordered(self) -> list[Any]:
        """The controls, in the order of the settings."""
        return [self.controls[name] for name in OPTIONS]

    @property
    def view(self) -> list[Any]:
        """What changes when another conversation is shown, or this one has gone on."""
        return [
            *(self.here, self.kept_here, self.start, self.stage, self.earlier, self.chat),
            *(self.status, self.box, self.refused, self.former, self.branches, self.later),
            *(self.listed, self.name, self.model, self.go_on, self.chosen),
            *(self.answer, self.difference),
            *self.reader.parts,
            *self.too_long.parts,
        ]

    def _conversations(self) -> None:
        self.new = gr.Button("New conversation", variant="primary", elem_id="new", size="md")
        self.search = gr.Textbox(
            label="Search",
            show_label=False,
            container=False,
            placeholder="Search",
            elem_id="search",
        )
        plain: dict[str, Any] = {"padding": False, "apply_default_css": False}
        listing = gr.HTML(elem_id="listing", **plain)
        gr.HTML(MENU_HTML, **plain)
        # What the list's script fills in and clicks: the row, its new name, and what to do.
        hidden: dict[str, Any] = {"visible": "hidden"}
        self.listed = gr.Textbox(elem_id="listed", **hidden)
        self.listed.change(None, [self.listed], [listing], js=script("list"))
        self.row = gr.Textbox(elem_id="row", **hidden)
        self.row_name = gr.Textbox(elem_id="row-name", **hidden)
        self.row_do = {
            name: gr.Button(name, elem_id=f"row-{name}", **hidden)
            for name in ("open", "restore", *ACTIONS)
        }
        # Ids of what is being answered, so that the list changes when one begins or ends.
        self.busy = gr.Textbox(elem_id="busy", **hidden)
        self.name = gr.Textbox(elem_id="name", **hidden)
        self.export = gr.Textbox(elem_id="export-text", **hidden)
        self.export_name = gr.Textbox(elem_id="export-name", **hidden)

    def _conversation(self, models: Models) -> None:
        self.earlier = gr.Button(
            "Show earlier messages", visible=False, size="sm", elem_id="earlier"
        )
        self.chat = gr.Chatbot(
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
            placeholder="## Ask anything, or drop a document anywhere on this page",
            examples=EXAMPLES if models.here else EXAMPLES[:-1],
        )
        small: dict[str, Any] = {"size": "sm", "min_width": 0, "visible": False}
        with gr.Row(elem_id="last"):
            self.former = gr.Button("\u2039", elem_id="former", **small)
            self.branches = gr.Dropdown(
                [],
                label="Branch",
                show_label=False,
                container=False,
                visible=False,
                elem_id="branches",
                interactive=True,
            )
            self.later = gr.Button("\u203a", elem_id="later", **small)
            self.go_on = gr.Button("Continue", elem_id="continue", **small)
        self.status = gr.HTML(elem_id="status", padding=False)
        self.reader = ReaderBar()
        self.too_long = TooLongBar()
        self.unapplied = gr.HTML(elem_id="unapplied", padding=False)
        # What a script clicks when files come into the box, or are taken out of it.
        self.keep_up = gr.Button("Read ahead", elem_id="keep-up", visible="hidden")
        # Paths of files that could not be read, which a script takes out of the box.
        self.refused = gr.Textbox(visible="hidden")
        self.box = gr.MultimodalTextbox(
            label="Message",
            show_label=False,
            placeholder="Type a message",
            file_count="multiple",
            sources=["upload"],
            max_plain_text_length=_PASTE,
            elem_id="box",
            autofocus=True,
            submit_btn=True,
            stop_btn=False,
        )

    def _answer(self, models: Models) -> None:
        with gr.Row():
            small: dict[str, Any] = {"size": "sm", "visible": models.here}
            self.check = gr.Button("Check the last answer", elem_id="check", **small)
            self.end_check = gr.Button("Stop checking", elem_id="end-check", min_width=60, **small)
            self.fork = gr.Button("Branch from this one", size="sm", elem_id="fork")
        self.difference = gr.HTML(elem_id="difference", padding=False)
        self.answer = gr.HTML(elem_id="answer", padding=False, apply_default_css=False)

    def _settings(self, settings: Settings, models: Models) -> None:
        def controls(*names: str) -> None:
            for name in names:
                self.controls[name] = control(name, getattr(settings, name), models)

        controls(*FIRST)
        chosen = priority_of(shown_values(settings))
        self.priority = gr.Radio(
            [each.name for each in PRIORITIES],
            value=None if chosen is None else chosen.name,
            label="What matters most",
            info=about(chosen),
            elem_id="priority",
            visible=models.here,
        )
        controls(*ANSWER)
        with gr.Accordion(
            "What it takes", elem_id="takes", open=False, visible=models.here
        ) as self.takes:
            self.tokens = gr.Number(
                PLANNED,
                label="Tokens to plan for",
                info="a page of text has about 500",
                minimum=1,
                precision=0,
                elem_id="plan-tokens",
            )
            self.phases = gr.HTML(elem_id="phases", padding=False)
        for title, names in FOLDED.items():
            with gr.Accordion(title, open=False, visible=any(map(models.may_set, names))):
                controls(*names)
        with gr.Accordion("Profiles", open=False):
            self.profiles = gr.Dropdown(
                [], value=None, label="Take settings from", elem_id="profiles"
            )
            self.profile_name = gr.Textbox(
                label="Save these settings as", elem_id="profile-name", max_length=64
            )
            with gr.Row():
                self.save_profile = gr.Button("Save", size="sm", elem_id="save-profile")
                self.delete_profile = gr.Button(
                    "Delete the one chosen", size="sm", elem_id="delete-profile"
                )
        with gr.Column(elem_id="apply-bar"):  # in sight however far one scrolls
            self.estimate = gr.HTML(elem_id="price", padding=False)
            self.pending = gr.HTML(elem_id="pending", padding=False)
            with gr.Row():
                self.apply = gr.Button("Apply", elem_id="apply")
                self.discard = gr.Button("Discard", elem_id="discard", min_width=60)
                # In sight while a model is loaded, as style.css says.
                self.cancel = gr.Button("Cancel", elem_id="cancel-load", min_width=60)
            self.applied = gr.HTML(elem_id="applied", padding=False)
