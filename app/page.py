"""The page: its components, and what happens when they are used."""

from typing import Any

import gradio as gr

from .api import for_programs
from .conversation_events import ConversationEvents
from .engine.live import Live
from .engine.service import Service
from .estimate import Estimator
from .form import Models
from .layout import Parts, lay_out
from .request_context import owner_of
from .settings_events import SettingsEvents
from .sidebar_events import SidebarEvents
from .views.live import live_html
from .web.scripts import CHOSEN, COPIED, NAMED, NARROW, NEW, ONE_STOP, SAVE_AS_FILE, SURE, UNFOLDED
from .web.validation import ValidatedPage

# What changes quickly is not shown as being loaded, and never waits behind an answer.
_AT_ONCE: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}
# What may take as long as an answer does, where who goes first is the engine's to say; and what may
# be refused, of which gradio tells nobody but the console if it is not queued.
_WORK: dict[str, Any] = {
    "concurrency_limit": None,
    "show_progress": "hidden",
    "api_visibility": "private",
}


def make_page(service: Service, live: Live, estimator: Estimator, models: Models) -> gr.Blocks:
    """The app."""
    page = ValidatedPage(
        title="kvlite",
        analytics_enabled=False,
        delete_cache=(3600, 3600),
        fill_height=True,
        fill_width=True,
    )
    with page:
        for_programs(service, live)  # first, so that no event of the page takes their names
        parts = lay_out(service.model_host.settings, models)
        events, sidebar_events = ConversationEvents(service, parts), SidebarEvents(service)
        settings_events = SettingsEvents(service, estimator, models, events.tabs)
        # What lists the conversations, after all that may have changed them.
        found: dict[str, Any] = {
            "fn": sidebar_events.found,
            "inputs": [parts.search],
            "outputs": [parts.listing],
            **_AT_ONCE,
        }
        # What fills the controls with the settings of the conversation that is shown.
        filled: dict[str, Any] = {
            "fn": settings_events.shown,
            "outputs": [*parts.ordered, parts.applied, parts.filled],
            **_AT_ONCE,
        }
        _about_talking(page, parts, events, settings_events, found, filled)
        _about_list(page, parts, sidebar_events, events, found, filled)
        _about_settings(page, parts, settings_events, found)
        _about_memory(page, parts, live)
        for script in (NARROW, UNFOLDED, COPIED, ONE_STOP):
            page.load(None, None, None, js=script)
        parts.box.change(None, [parts.box], None, js=NAMED)
    return page


def _about_talking(
    page: gr.Blocks,
    parts: Parts,
    events: ConversationEvents,
    settings_events: SettingsEvents,
    found: dict[str, Any],
    filled: dict[str, Any],
) -> None:
    here, search, shown = parts.here, parts.search, [parts.here, parts.start]
    loaded = page.load(events.load, [parts.kept_here, search], parts.view, **_WORK)
    _followed(loaded, parts, events, found)
    loaded.then(**filled | {"fn": settings_events.loaded, "inputs": [here, parts.filled]})
    for event, act, inputs in (
        (parts.box.submit, events.say, [*shown, search, parts.box]),
        (parts.chat.retry, events.regenerate, shown),
        (parts.chat.undo, events.undo, shown),
        (parts.chat.edit, events.edit, shown),
        (parts.fork.click, events.branch, [*shown, parts.chosen]),
        (parts.branches.input, events.switch, [*shown, parts.branches]),
    ):
        _followed(event(act, inputs, parts.view, **_WORK), parts, events, found)
    parts.box.stop(events.stop, [here], None, **_AT_ONCE)
    parts.earlier.click(
        events.show_all, [here], [parts.start, parts.earlier, parts.chat], **_AT_ONCE
    )
    parts.chat.select(events.choose, shown, [parts.chosen, parts.answer, parts.side], **_AT_ONCE)
    parts.check.click(events.check, [here], [parts.difference], **_WORK)
    parts.end_check.click(events.stop_check, [here], None, **_AT_ONCE)


def _followed(begun: Any, parts: Parts, events: ConversationEvents, found: dict[str, Any]) -> None:
    """After an event that may have begun something, follow it, and show what has become of it."""
    at = [parts.here, parts.start, parts.stage]
    for _ in range(2):  # something else may begin as it ends
        coming = begun.then(
            events.follow,
            at,
            [parts.chat, parts.status, parts.stage],
            trigger_mode="multiple",  # one may still be told that it is to leave off
            **_WORK,
        )
        begun = coming.then(
            events.ended,
            [*at, parts.box],
            parts.view,
            trigger_mode="multiple",
            **_AT_ONCE,
        )
    begun.then(**found)


def _about_list(
    page: gr.Blocks,
    parts: Parts,
    sidebar_events: SidebarEvents,
    events: ConversationEvents,
    found: dict[str, Any],
    filled: dict[str, Any],
) -> None:
    here, search, view = parts.here, parts.search, parts.view
    page.load(**found)
    for event, chosen, script in (
        (parts.new.click, here, NEW),
        (parts.listing.input, parts.listing, CHOSEN),
    ):
        shown = event(
            events.show,
            [chosen, search, here, parts.box],
            view,
            js=script,
            trigger_mode="multiple",
            **_AT_ONCE,
        )
        _followed(shown, parts, events, found)
        shown.then(inputs=[here], trigger_mode="always_last", **filled)
    # What is pasted is no input to gradio's text boxes, only a change; what is typed while one
    # search goes on is searched for after it.
    parts.search.change(trigger_mode="always_last", **found)
    parts.name.submit(sidebar_events.rename, [here, parts.name, search], [parts.listing], **_WORK)
    parts.delete.click(None, None, None, js=SURE)
    gone = parts.delete_now.click(events.delete, [here, search, parts.box], view, **_WORK)
    _followed(gone, parts, events, found)
    gone.then(inputs=[here], **filled)
    exported = [parts.export, parts.export_name]
    for button, text in (
        (parts.markdown, sidebar_events.as_markdown),
        (parts.json, sidebar_events.as_json),
    ):
        button.click(text, [here], exported, **_WORK).then(
            None, exported, exported, js=SAVE_AS_FILE
        )


def _about_settings(
    page: gr.Blocks, parts: Parts, settings_events: SettingsEvents, found: dict[str, Any]
) -> None:
    controls = [parts.tokens, *parts.ordered]
    estimate: dict[str, Any] = {
        "fn": settings_events.estimate,
        "inputs": controls,
        "outputs": [parts.estimate, parts.phases],
        "show_progress": "hidden",
        "concurrency_id": "price",
        "concurrency_limit": 2,
        "api_visibility": "private",
    }
    gr.on([each.change for each in controls], trigger_mode="always_last", **estimate)
    page.load(**estimate)
    parts.apply.click(
        settings_events.apply,
        [parts.here, parts.filled, *parts.ordered],
        [parts.applied, parts.filled],
        **_WORK,
    ).then(**found)
    page.load(settings_events.profiles, None, [parts.profiles], **_AT_ONCE)
    parts.profiles.input(
        settings_events.take,
        [parts.profiles, *parts.ordered],
        [*parts.ordered, parts.applied],
        **_WORK,
    ).then(**estimate)
    parts.save_profile.click(
        settings_events.save,
        [parts.profile_name, *parts.ordered],
        [parts.profiles, parts.applied],
        **_WORK,
    )
    parts.delete_profile.click(settings_events.remove, [parts.profiles], [parts.profiles], **_WORK)


def _about_memory(page: gr.Blocks, parts: Parts, live: Live) -> None:
    def look(here: str, request: gr.Request) -> str:
        return live_html(live.look(), owner_of(request), here)

    parts.clock.tick(look, [parts.here], [parts.live], **_AT_ONCE)
    page.load(look, [parts.here], [parts.live], **_AT_ONCE)
