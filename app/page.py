"""The page: its components, and what happens when they are used."""

from typing import Any

import gradio as gr

from .browsing import Browsing
from .layout import SAVE_AS_FILE, Parts, lay_out
from .live import Live
from .live_view import live_html
from .pricing import Pricer
from .programs import for_programs
from .service import Service
from .talking import Talking, owner_of
from .tuning import Tuning

# What changes quickly is not shown as being loaded, and never waits behind an answer.
_AT_ONCE: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}
# What may take as long as an answer does; who goes first is the engine's to say.
_WORK: dict[str, Any] = {
    "concurrency_limit": None,
    "show_progress": "hidden",
    "api_visibility": "private",
}
# On a phone what is beside the conversation would hide it; and its buttons have no names, nor does
# a reader of the screen know what tells how things stand.
_NARROW = """() => {
  document.getElementById('status')?.setAttribute('aria-live', 'polite');
  for (const [id, name] of [['conversations', 'Conversations'], ['side', 'Memory and settings']]) {
    const side = document.getElementById(id), button = side?.querySelector('.toggle-button');
    button?.setAttribute('aria-label', name);
    if (innerWidth <= 768 && side?.classList.contains('open')) button?.click();
  }
}"""
# And is in the way once a conversation was chosen there.
_CLOSE = """(...values) => {
  const side = document.getElementById('conversations');
  if (innerWidth <= 768 && side?.classList.contains('open'))
    side.querySelector('.toggle-button')?.click();
  return values;
}"""
# An account that is unfolded is chosen as well, like an answer that is clicked on.
_UNFOLDED = """() => {
  const chosen = (event) => event.target.closest?.('#chat .thought-group > .title')
    ?.closest('[data-testid=bot]')?.click();
  document.addEventListener('click', chosen, true);
  document.addEventListener('keydown', (event) => event.key === 'Enter' && chosen(event), true);
}"""
_SURE = """(id) => [id, confirm('Delete this conversation for good?')]"""


def make_page(service: Service, live: Live, pricer: Pricer) -> gr.Blocks:
    """The app."""
    page = gr.Blocks(
        title="kvlite",
        analytics_enabled=False,
        delete_cache=(3600, 3600),
        fill_height=True,
        fill_width=True,
    )
    with page:
        for_programs(service, live)  # first, so that no event of the page takes their names
        parts = lay_out(service.settings)
        talking, browsing = Talking(service, parts), Browsing(service)
        tuning = Tuning(service, pricer)
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
        for script in (_NARROW, _UNFOLDED):
            page.load(None, None, None, js=script)
    return page


def _about_talking(page: gr.Blocks, parts: Parts, talking: Talking, found: dict[str, Any]) -> None:
    here = parts.here
    for event, act, inputs in (
        (page.load, talking.show, [parts.kept_here]),
        (parts.box.submit, talking.say, [here, parts.box]),
        (parts.chat.retry, talking.regenerate, [here]),
        (parts.chat.undo, talking.undo, [here]),
        (parts.chat.edit, talking.edit, [here]),
        (parts.fork.click, talking.branch, [here, parts.chosen]),
        (parts.branches.input, talking.switch, [here, parts.branches]),
    ):
        event(act, inputs, parts.view, **_WORK).then(**found)
    parts.box.stop(talking.stop, [here], None, **_AT_ONCE)
    parts.chat.select(talking.choose, [here], [parts.chosen, parts.answer, parts.side], **_AT_ONCE)
    parts.check.click(talking.check, [here], [parts.difference], **_WORK)
    parts.end_check.click(talking.stop, [here], None, **_AT_ONCE)


def _about_list(
    page: gr.Blocks,
    parts: Parts,
    browsing: Browsing,
    talking: Talking,
    tuning: Tuning,
    found: dict[str, Any],
) -> None:
    here, view = parts.here, parts.view
    shown: dict[str, Any] = {"fn": tuning.shown, "outputs": parts.ordered, **_AT_ONCE}
    page.load(**found)
    page.load(inputs=[parts.kept_here], **shown)
    begun = parts.new.click(talking.begin, None, view, js=_CLOSE, **_WORK)
    begun.then(inputs=[here], **shown)
    # Another is shown while one is followed, for which the second event goes on and on.
    parts.listing.input(inputs=[parts.listing], **shown)
    parts.listing.input(
        talking.show, [parts.listing], view, js=_CLOSE, trigger_mode="multiple", **_WORK
    ).then(**found)
    # What is pasted is no input to gradio's text boxes, only a change; what is typed while one
    # search goes on is searched for after it.
    parts.search.change(trigger_mode="always_last", **found)
    parts.name.submit(
        browsing.rename, [here, parts.name, parts.search], [parts.listing], **_AT_ONCE
    )
    gone = parts.delete.click(browsing.delete, [here, parts.sure], [here], js=_SURE, **_WORK)
    gone.then(inputs=[here], **shown)
    gone.then(talking.show, [here], view, **_WORK).then(**found)
    exported = [parts.export, parts.export_name]
    for button, text in ((parts.markdown, browsing.as_markdown), (parts.json, browsing.as_json)):
        button.click(text, [here], exported, **_AT_ONCE).then(
            None, exported, exported, js=SAVE_AS_FILE
        )


def _about_settings(page: gr.Blocks, parts: Parts, tuning: Tuning, found: dict[str, Any]) -> None:
    controls = [parts.tokens, *parts.ordered]
    pricing: dict[str, Any] = {
        "fn": tuning.price,
        "inputs": controls,
        "outputs": [parts.price],
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
        tuning.take, [parts.profiles, *parts.ordered], parts.ordered, **_AT_ONCE
    ).then(**pricing)
    parts.save_profile.click(
        tuning.save, [parts.profile_name, *parts.ordered], [parts.profiles], **_AT_ONCE
    )
    parts.delete_profile.click(tuning.remove, [parts.profiles], [parts.profiles], **_AT_ONCE)


def _about_memory(page: gr.Blocks, parts: Parts, live: Live) -> None:
    def look(request: gr.Request) -> str:
        return live_html(live.look(), owner_of(request))

    parts.clock.tick(look, None, [parts.live], **_AT_ONCE)
    page.load(look, None, [parts.live], **_AT_ONCE)
