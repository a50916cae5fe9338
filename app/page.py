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
from .web.scripts import CLOSE, COPIED, NAMED, NARROW, ONE_STOP, SAVE_AS_FILE, SURE, UNFOLDED

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
        tuning = Tuning(service, pricer, models)
        # What lists the conversations, after all that may have changed them.
        found: dict[str, Any] = {
            "fn": browsing.found,
            "inputs": [parts.search],
            "outputs": [parts.listing],
            **_AT_ONCE,
        }
        _about_talking(page, parts, talking, found)
        _about_list(page, parts, browsing, talking, tuning, found)
        _about_settings(page, parts, tuning, found)
        _about_memory(page, parts, live)
        for script in (NARROW, UNFOLDED, COPIED, ONE_STOP):
            page.load(None, None, None, js=script)
        parts.box.change(None, [parts.box], None, js=NAMED)
    return page


def _about_talking(page: gr.Blocks, parts: Parts, talking: Talking, found: dict[str, Any]) -> None:
    here, search, shown = parts.here, parts.search, [parts.here, parts.start]
    for event, act, inputs in (
        (page.load, talking.load, [parts.kept_here, search]),
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
    parts.end_check.click(talking.stop, [here], None, **_AT_ONCE)


def _followed(begun: Any, parts: Parts, talking: Talking, found: dict[str, Any]) -> None:
    """After an event that may have begun something, follow it, and show what has become of it."""
    shown, stage = [parts.here, parts.start], parts.stage
    coming = begun.then(
        talking.follow,
        [*shown, stage],
        [parts.chat, parts.status, stage],
        trigger_mode="multiple",  # one may still be told that it is to leave off
        **_WORK,
    )
    ended = coming.then(
        talking.ended,
        [*shown, parts.search, stage],
        parts.view,
        trigger_mode="multiple",
        **_AT_ONCE,
    )
    ended.then(**found)


def _about_list(
    page: gr.Blocks,
    parts: Parts,
    browsing: Browsing,
    talking: Talking,
    tuning: Tuning,
    found: dict[str, Any],
) -> None:
    here, search, view = parts.here, parts.search, parts.view
    shown: dict[str, Any] = {
        "fn": tuning.shown,
        "outputs": [*parts.ordered, parts.applied],
        **_AT_ONCE,
    }
    page.load(**found)
    page.load(inputs=[parts.kept_here], **shown)
    before = [search, here, parts.box]
    begun = parts.new.click(talking.begin, before, view, js=CLOSE, **_AT_ONCE)
    begun.then(inputs=[here], **shown)
    chosen = parts.listing.input(
        talking.show,
        [parts.listing, *before],
        view,
        js=CLOSE,
        trigger_mode="multiple",
        **_AT_ONCE,
    )
    _followed(chosen, parts, talking, found)
    chosen.then(inputs=[here], trigger_mode="always_last", **shown)
    # What is pasted is no input to gradio's text boxes, only a change; what is typed while one
    # search goes on is searched for after it.
    parts.search.change(trigger_mode="always_last", **found)
    parts.name.submit(browsing.rename, [here, parts.name, search], [parts.listing], **_WORK)
    gone = parts.delete.click(
        browsing.delete,
        [here, parts.sure],
        [here],
        js=SURE,
        trigger_mode="multiple",  # whoever was not sure may be so at once
        **_WORK,
    )
    gone.then(inputs=[here], **shown)
    after = gone.then(talking.show, [here, *before], view, **_AT_ONCE)
    _followed(after, parts, talking, found)
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
    parts.apply.click(tuning.apply, [parts.here, *parts.ordered], [parts.applied], **_WORK).then(
        **found
    )
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
