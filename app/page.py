"""The page: its components, and what happens when they are used."""

from typing import Any

import gradio as gr

from .browsing import Browsing
from .engine.live import Live
from .engine.service import Service
from .form import Models
from .layout import Parts, lay_out
from .pricing import Pricer
from .programs import for_programs
from .talking import Talking
from .tuning import Tuning
from .views.live import live_html
from .visit import owner_of
from .web.asked import Page
from .web.scripts import CHOSEN, COPIED, NAMED, NARROW, NEW, ONE_STOP, SAVE_AS_FILE, SURE, UNFOLDED

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


def make_page(service: Service, live: Live, pricer: Pricer, models: Models) -> gr.Blocks:
    """The app."""
    page = Page(
        title="kvlite",
        analytics_enabled=False,
        delete_cache=(3600, 3600),
        fill_height=True,
        fill_width=True,
    )
    with page:
        for_programs(service, live)  # first, so that no event of the page takes their names
        parts = lay_out(service.loaded.settings, models)
        talking, browsing = Talking(service, parts), Browsing(service)
        tuning = Tuning(service, pricer, models, talking.tabs)
        # What lists the conversations, after all that may have changed them.
        found: dict[str, Any] = {
            "fn": browsing.found,
            "inputs": [parts.search],
            "outputs": [parts.listing],
            **_AT_ONCE,
        }
        # What fills the controls with the settings of the conversation that is shown.
        filled: dict[str, Any] = {
            "fn": tuning.shown,
            "outputs": [*parts.ordered, parts.applied, parts.filled],
            **_AT_ONCE,
        }
        _about_talking(page, parts, talking, tuning, found, filled)
        _about_list(page, parts, browsing, talking, found, filled)
        _about_settings(page, parts, tuning, found)
        _about_memory(page, parts, live)
        for script in (NARROW, UNFOLDED, COPIED, ONE_STOP):
            page.load(None, None, None, js=script)
        parts.box.change(None, [parts.box], None, js=NAMED)
    return page


def _about_talking(
    page: gr.Blocks,
    parts: Parts,
    talking: Talking,
    tuning: Tuning,
    found: dict[str, Any],
    filled: dict[str, Any],
) -> None:
    here, search, shown = parts.here, parts.search, [parts.here, parts.start]
    loaded = page.load(talking.load, [parts.kept_here, search], parts.view, **_WORK)
    _followed(loaded, parts, talking, found)
    loaded.then(**filled | {"fn": tuning.loaded, "inputs": [here, parts.filled]})
    for event, act, inputs in (
        (parts.box.submit, talking.say, [*shown, search, parts.box]),
        (parts.chat.retry, talking.regenerate, shown),
        (parts.chat.undo, talking.undo, shown),
        (parts.chat.edit, talking.edit, shown),
        (parts.fork.click, talking.branch, [*shown, parts.chosen]),
        (parts.branches.input, talking.switch, [*shown, parts.branches]),
    ):
        _followed(event(act, inputs, parts.view, **_WORK), parts, talking, found)
    parts.box.stop(talking.stop, [here], None, **_AT_ONCE)
    parts.earlier.click(
        talking.show_all, [here], [parts.start, parts.earlier, parts.chat], **_AT_ONCE
    )
    parts.chat.select(talking.choose, shown, [parts.chosen, parts.answer, parts.side], **_AT_ONCE)
    parts.check.click(talking.check, [here], [parts.difference], **_WORK)
    parts.end_check.click(talking.stop_check, [here], None, **_AT_ONCE)


def _followed(begun: Any, parts: Parts, talking: Talking, found: dict[str, Any]) -> None:
    """After an event that may have begun something, follow it, and show what has become of it."""
    at = [parts.here, parts.start, parts.stage]
    for _ in range(2):  # something else may begin as it ends
        coming = begun.then(
            talking.follow,
            at,
            [parts.chat, parts.status, parts.stage],
            trigger_mode="multiple",  # one may still be told that it is to leave off
            **_WORK,
        )
        begun = coming.then(
            talking.ended, [*at, parts.box], parts.view, trigger_mode="multiple", **_AT_ONCE
        )
    begun.then(**found)


def _about_list(
    page: gr.Blocks,
    parts: Parts,
    browsing: Browsing,
    talking: Talking,
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
            talking.show,
            [chosen, search, here, parts.box],
            view,
            js=script,
            trigger_mode="multiple",
            **_AT_ONCE,
        )
        _followed(shown, parts, talking, found)
        shown.then(inputs=[here], trigger_mode="always_last", **filled)
    # What is pasted is no input to gradio's text boxes, only a change; what is typed while one
    # search goes on is searched for after it.
    parts.search.change(trigger_mode="always_last", **found)
    parts.name.submit(browsing.rename, [here, parts.name, search], [parts.listing], **_WORK)
    parts.delete.click(None, None, None, js=SURE)
    gone = parts.delete_now.click(talking.delete, [here, search, parts.box], view, **_WORK)
    _followed(gone, parts, talking, found)
    gone.then(inputs=[here], **filled)
    exported = [parts.export, parts.export_name]
    for button, text in ((parts.markdown, browsing.as_markdown), (parts.json, browsing.as_json)):
        button.click(text, [here], exported, **_WORK).then(
            None, exported, exported, js=SAVE_AS_FILE
        )


def _about_settings(page: gr.Blocks, parts: Parts, tuning: Tuning, found: dict[str, Any]) -> None:
    controls = [parts.tokens, *parts.ordered]
    pricing: dict[str, Any] = {
        "fn": tuning.price,
        "inputs": controls,
        "outputs": [parts.price, parts.phases],
        "show_progress": "hidden",
        "concurrency_id": "price",
        "concurrency_limit": 2,
        "api_visibility": "private",
    }
    gr.on([each.change for each in controls], trigger_mode="always_last", **pricing)
    page.load(**pricing)
    parts.apply.click(
        tuning.apply,
        [parts.here, parts.filled, *parts.ordered],
        [parts.applied, parts.filled],
        **_WORK,
    ).then(**found)
    page.load(tuning.profiles, None, [parts.profiles], **_AT_ONCE)
    parts.profiles.input(
        tuning.take,
        [parts.profiles, *parts.ordered],
        [*parts.ordered, parts.applied],
        **_WORK,
    ).then(**pricing)
    parts.save_profile.click(
        tuning.save,
        [parts.profile_name, *parts.ordered],
        [parts.profiles, parts.applied],
        **_WORK,
    )
    parts.delete_profile.click(tuning.remove, [parts.profiles], [parts.profiles], **_WORK)


def _about_memory(page: gr.Blocks, parts: Parts, live: Live) -> None:
    def look(here: str, request: gr.Request) -> str:
        return live_html(live.look(), owner_of(request), here)

    parts.clock.tick(look, [parts.here], [parts.live], **_AT_ONCE)
    page.load(look, [parts.here], [parts.live], **_AT_ONCE)
