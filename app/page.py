"""The page: its components, and what their events do."""

from typing import Any

import gradio as gr

from .api import for_programs
from .conversation_events import ConversationEvents
from .engine.disk import Disk
from .engine.live import Live
from .engine.service import Service
from .form import Models
from .layout import SETTINGS_TAB, Parts
from .models_tab import MODELS_TAB, ModelsEvents
from .priorities import DECIDES
from .reader import ReaderEvents
from .settings_events import SettingsEvents
from .sidebar_events import SidebarEvents
from .tabs import owner_of
from .too_long import TooLongEvents
from .views.live import live_html
from .web.gradio_patches import script
from .web.validation import ValidatedPage

_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# What changes quickly never waits behind an answer.
_AT_ONCE: dict[str, Any] = {**_QUIET, "queue": False}
# What may take as long as an answer does: the engine decides who goes first. And what may be
# refused: gradio shows errors of queued events only.
_WORK: dict[str, Any] = {**_QUIET, "concurrency_limit": None}


def make_page(service: Service, models: Models) -> gr.Blocks:
    """The app."""
    page = ValidatedPage(
        title="kvlite",
        analytics_enabled=False,
        delete_cache=(3600, 3600),
        fill_height=True,
        fill_width=True,
    )
    live = Live(service.model_host)
    with page:
        for_programs(service, live)  # first, so that no event of the page takes their names
        _Wiring(page, service, live, models)
    return page


class _Wiring:
    def __init__(self, page: gr.Blocks, service: Service, live: Live, models: Models) -> None:
        self.page, self.service = page, service
        self.parts = Parts(service.host.settings, models)
        self.events = ConversationEvents(service, self.parts)
        self.sidebar_events = SidebarEvents(service)
        self.settings_events = SettingsEvents(service, models, self.events.tabs)
        parts = self.parts
        # Lists the conversations, after all that may have changed them.
        self.list_conversations: dict[str, Any] = {
            "fn": self.sidebar_events.found,
            "inputs": [parts.search],
            "outputs": [parts.listed],
            **_AT_ONCE,
        }
        # Fills the controls with the settings of the conversation that is shown.
        self.fill_controls: dict[str, Any] = {
            "fn": self.settings_events.shown,
            "inputs": [parts.here],
            "outputs": [*parts.ordered, parts.applied, parts.filled],
            **_AT_ONCE,
        }
        # Shows the conversation as it is with another model.
        self.show_again: dict[str, Any] = {
            "fn": self.events.refresh,
            "inputs": [parts.here, parts.start],
            "outputs": parts.view,
            **_AT_ONCE,
        }
        self._conversation()
        self._sidebar()
        self._settings()
        if models.here:
            self._model_here(models)
        self._memory(live)
        page.load(None, None, None, js=script("fit"))
        for name in ("name", "keepUp"):
            parts.box.change(None, [parts.box], None, js=script(name))
        parts.refused.change(None, [parts.refused, parts.box], [parts.box], js=script("refuse"))
        chosen_in = MODELS_TAB if models.here else SETTINGS_TAB
        parts.model.click(lambda: gr.Tabs(selected=chosen_in), None, [parts.side], **_AT_ONCE)
        parts.model.click(None, None, None, js=script("showSide"))
        gr.on(
            [parts.here.change, parts.name.change],
            None,
            [parts.here, parts.name],
            js=script("title"),
        )

    def _conversation(self) -> None:
        parts, events, here = self.parts, self.events, self.parts.here
        kept = [parts.kept_here, parts.search]
        loaded = self.page.load(events.load, kept, parts.view, js=script("address"), **_WORK)
        self._follow(loaded)
        loaded.then(
            **self.fill_controls
            | {"fn": self.settings_events.loaded, "inputs": [here, parts.filled]}
        )
        shown = [here, parts.start]
        asked, arrived = [*shown, parts.search], script("arrive")
        for event, act, inputs, js in (
            (parts.box.submit, events.say, [*asked, parts.box], arrived),
            (parts.keep_up.click, events.read_ahead, [*asked, parts.box], arrived),
            (parts.chat.example_select, events.try_sample, asked, arrived),
            (parts.chat.retry, events.regenerate, shown, None),
            (parts.go_on.click, events.continue_answer, shown, None),
            (parts.reader.again.click, events.read_again, shown, None),
            (parts.too_long.relevant.click, events.say_parts, [*asked, parts.box], None),
            (parts.too_long.compact.click, events.compact, [*asked, parts.box], None),
            (parts.chat.undo, events.undo, shown, None),
            (parts.chat.edit, events.edit, shown, None),
            (parts.fork.click, events.branch, [*shown, parts.chosen], None),
            (parts.branches.input, events.switch, [*shown, parts.branches], None),
            (parts.former.click, events.former, shown, None),
            (parts.later.click, events.later, shown, None),
        ):
            self._begins(event, act, inputs, js)
        parts.box.stop(events.stop, [here], None, **_AT_ONCE)
        parts.earlier.click(
            events.show_all, [here], [parts.start, parts.earlier, parts.chat], **_AT_ONCE
        )
        chosen = [parts.chosen, parts.answer, parts.side]
        parts.chat.select(events.choose, shown, chosen, **_AT_ONCE)

    def _begins(self, event: Any, act: Any, inputs: list[Any], js: str | None = None) -> None:
        outputs = [*self.parts.view, self.parts.side, self.parts.takes]
        self._follow(event(act, inputs, outputs, js=js, **_WORK))

    def _follow(self, begun: Any) -> None:
        """After an event that may have begun something, show it as it comes and as it ended."""
        parts = self.parts
        at = [parts.here, parts.start, parts.stage]
        for _ in range(2):  # something else may begin as it ends
            coming = begun.then(
                self.events.follow,
                at,
                [parts.chat, parts.status, parts.stage],
                trigger_mode="multiple",  # the one before it may still have to be told to stop
                **_WORK,
            )
            begun = coming.then(
                self.events.ended,
                [*at, parts.box],
                parts.view,
                trigger_mode="multiple",
                **_AT_ONCE,
            )
        begun.then(**self.list_conversations)

    def _sidebar(self) -> None:
        parts, sidebar_events = self.parts, self.sidebar_events
        here, search, row, do = parts.here, parts.search, parts.row, parts.row_do
        self.page.load(**self.list_conversations)
        for event, act, chosen, name in (
            (parts.new.click, self.events.show, here, "begin"),
            (do["open"].click, self.events.show, row, "choose"),
            (do["restore"].click, self.events.restore, row, "choose"),
        ):
            shown = event(
                act,
                [chosen, search, here, parts.box],
                parts.view,
                js=script(name),
                trigger_mode="multiple",
                **_AT_ONCE,
            )
            self._follow(shown)
            shown.then(trigger_mode="always_last", **self.fill_controls)
        # Pasting is no input event of gradio's text boxes, only a change; and what is typed during
        # a search is searched for after it.
        for changes in (search.change, parts.busy.change):
            changes(trigger_mode="always_last", **self.list_conversations)
        renamed = [row, parts.row_name, search, here]
        do["rename"].click(sidebar_events.rename, renamed, [parts.listed, parts.name], **_WORK)
        gone = do["delete"].click(
            self.events.delete, [row, search, here, parts.box], parts.view, **_WORK
        )
        self._follow(gone)
        gone.then(**self.fill_controls)
        exported = [parts.export, parts.export_name]
        for button, text in (
            (do["markdown"], sidebar_events.as_markdown),
            (do["json"], sidebar_events.as_json),
        ):
            saved = button.click(text, [row], exported, **_WORK)
            saved.then(None, exported, exported, js=script("save"))

    def _settings(self) -> None:
        parts, events, ordered = self.parts, self.settings_events, self.parts.ordered
        applied, profiles = parts.applied, parts.profiles
        inputs = [parts.here, parts.filled, *ordered]
        parts.apply.click(events.apply, inputs, [applied, parts.filled], **_WORK).then(
            **self.list_conversations
        ).then(**self.show_again)
        gr.on(
            [each.change for each in (parts.filled, *ordered)],
            events.pending,
            [parts.filled, *ordered],
            [parts.pending, parts.unapplied, parts.apply, applied],
            trigger_mode="always_last",  # which holds for what is queued
            **_QUIET,
        )
        parts.discard.click(**self.fill_controls)
        parts.cancel.click(self.service.stop_loading, None, None, **_AT_ONCE)
        self.page.load(events.profiles, None, [profiles], **_AT_ONCE)
        self.taken = profiles.input(events.take, [profiles, *ordered], ordered, **_WORK)
        named = [parts.profile_name, *ordered]
        parts.save_profile.click(events.save, named, [profiles, applied], **_WORK)
        parts.delete_profile.click(events.remove, [profiles], [profiles], **_WORK)

    def _model_here(self, models: Models) -> None:
        parts, events, ordered = self.parts, self.settings_events, self.parts.ordered
        here, controls = parts.here, [parts.tokens, *ordered]
        used = ModelsEvents(self.service, models).wire(
            parts.models_tab, parts.models, parts.dropped, _WORK
        )
        used.then(**self.show_again).then(**self.fill_controls)
        bar = parts.reader
        reader = ReaderEvents(self.service, bar, models, self.events.tabs)
        bar.unpriced.change(reader.price, [bar.unpriced, here], [bar.told, bar.again], **_WORK)
        stayed = bar.stay.click(reader.stay, [here], [parts.status], **_WORK)
        stayed.then(**self.show_again).then(**self.fill_controls)
        too_long = parts.too_long
        offers = TooLongEvents(self.service, too_long, models, self.events.tabs)
        offered = [too_long.told, too_long.use, too_long.longer]
        too_long.unpriced.change(offers.price, [too_long.unpriced, here], offered, **_WORK)
        loaded = too_long.use.click(offers.use, [too_long.longer, here], [parts.status], **_WORK)
        sent = [here, parts.start, parts.search, parts.box]
        self._begins(loaded.success, self.events.say, sent)
        loaded.then(**self.fill_controls)
        parts.check.click(self.events.check, [here], [parts.difference], **_WORK)
        parts.end_check.click(self.events.stop_check, [here], None, **_AT_ONCE)
        estimate: dict[str, Any] = {
            "fn": events.estimate,
            "inputs": controls,
            "outputs": [parts.estimate, parts.phases, parts.apply],
            "concurrency_id": "price",
            "concurrency_limit": 2,
            **_QUIET,
        }
        gr.on([each.change for each in controls], trigger_mode="always_last", **estimate)
        self.page.load(**estimate)
        planned = [here, parts.tokens]
        parts.settings_tab.select(events.plan_for, planned, [parts.tokens], **_AT_ONCE)
        decided = [parts.controls[name] for name in DECIDES]
        preferred = [*decided, parts.priority]
        parts.priority.input(events.prefer, [parts.priority, *ordered], preferred, **_AT_ONCE)
        changes = [each.change for each in decided]
        gr.on(changes, events.preferred, ordered, [parts.priority], **_AT_ONCE)
        self.taken.then(**estimate)

    def _memory(self, live: Live) -> None:
        disk = Disk()

        def look(here: str, request: gr.Request) -> tuple[str, str]:
            owner = owner_of(request)
            shown = live_html(live.look(), owner, here, disk.of(self.service.store(owner)))
            return shown, self.sidebar_events.busy(request)

        parts = self.parts
        for event in (parts.clock.tick, self.page.load):
            event(look, [parts.here], [parts.live, parts.busy], **_AT_ONCE)
