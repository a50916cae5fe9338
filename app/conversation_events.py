"""What happens when someone sends a message, goes back, or shows a conversation."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr

from kvlite.errors import KvliteError, SettingError
from kvlite.web.work import Work

from .conversation_view import BEGUN, ENDED, ConversationView, Updates
from .engine.other_model import read_again
from .engine.parts import is_too_long
from .engine.read_ahead import keep_up, refusal
from .engine.service import Service
from .layout import (
    ANSWER_TAB,
    DOCUMENT,
    EXAMPLES,
    QUESTION,
    SETTINGS_TAB,
    Parts,
    sample_document,
)
from .sidebar_events import listing_of
from .tabs import Tabs, owner_of
from .views.history import History, answering
from .views.status import sentence_html, status_html

# The temperature of another answer where the settings leave nothing to chance.
_WARMER = 0.7


class ConversationEvents:
    """The page's events about the conversation that is shown. Each begins something, `follow` shows
    it as it comes, and `ended` shows all anew."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts
        self.tabs = Tabs()

    def load(self, id: str, query: str, request: gr.Request) -> Updates:
        """Show the conversation that a browser showed last, unless its user chose one meanwhile."""
        view = self._view(request, self._there(id, request), query=query)
        if not self.tabs.arrive(view.tab, view.id):
            return {self.parts.status: gr.skip()}
        return self._if_shown(view, view.opened())

    def show(
        self, id: str, query: str, here: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Show the end of a conversation, and from now on what is done for it and no other. What
        was `said` stays in the box, unless it is the draft of the one that was shown (`here`)."""
        view = self._view(request, self._there(id, request), query=query)
        self.tabs.go(view.tab, view.id)
        left = here not in ("", view.id)
        draft = self.service.record(view.owner, here).draft if left else ""
        empty = bool(draft) and draft == _text_of(said)
        updates = view.opened(empty=empty, refill=empty or not _typed(said))
        return self._if_shown(view, updates)

    def delete(
        self, id: str, query: str, here: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Delete a conversation, and show a new one in the place of the one shown (`here`)."""
        view = self._view(request, id, query=query)
        try:
            self.service.forget(view.owner, id)
        except SettingError as error:
            gr.Warning(str(error))
            return {self.parts.listed: gr.skip()}
        listed = {self.parts.listed: listing_of(self.service, view.owner, query)}
        if here != id or not self.tabs.shows(view.tab, id):
            return listed
        return self.show("", query, id, said, request) | listed

    def restore(
        self, id: str, query: str, here: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Bring back what was deleted last, and show it; arguments are those of `show`."""
        self.service.store(owner_of(request)).restore(id)
        return self.show(id, query, here, said, request)

    def show_all(self, id: str, request: gr.Request) -> Updates:
        """Show the beginning of a long conversation too."""
        view = self._view(request, id)
        return self._if_shown(view, {self.parts.start: 0} | view.messages(view.history))

    def say(
        self, id: str, start: int, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Send what is in the box, to a new conversation where none could be shown."""
        id = id or self.service.store(owner_of(request)).new().id
        view = self._view(request, id, start, query)
        text, files = _text_of(said), _files_of(said)
        if not text and not files:
            return self._say_first()
        return self._do(view, lambda: self.service.say(view.owner, id, text, files), empty=True)

    def say_parts(
        self, id: str, start: int, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Send what is in the box, and read the relevant parts of its documents."""
        view = self._view(request, id, start, query)
        text, files = _text_of(said), _files_of(said)
        if not text:
            return self._say_first()

        def begin() -> Work:
            return self.service.say(view.owner, id, text, files, parts=True)

        return self._do(view, begin, empty=True)

    def compact(
        self, id: str, start: int, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Send what is in the box to a conversation that forgets its beginning from now on."""
        view = self._view(request, id, start, query)
        text, files = _text_of(said), _files_of(said)

        def begin() -> Work:
            self.service.change(view.owner, id, {"beyond_context": "compact"}).wait()
            return self.service.say(view.owner, id, text, files)

        return self._do(view, begin, empty=True) if text else self._say_first()

    def read_ahead(
        self, id: str, start: int, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Read what was dropped into the box while its question is typed, and forget what was taken
        out of it again; the box stays as it is. What is wrong is said once it is sent."""
        id = id or self.service.store(owner_of(request)).new().id
        view = self._view(request, id, start, query)
        try:
            work = keep_up(self.service, view.owner, id, _files_of(said))
        except (KvliteError, OSError):
            work = None
        if work is None:
            return self._taken_out(view, _files_of(said))
        self.tabs.go(view.tab, view.id)
        return self._if_shown(view, view.begun())

    def try_sample(
        self, id: str, start: int, query: str, event: gr.SelectData, request: gr.Request
    ) -> Updates:
        """Send one of the samples, its document with it; or show what fits this machine."""
        place = event.index if isinstance(event.index, int) else 0
        text = EXAMPLES[place]["text"] if 0 <= place < len(EXAMPLES) else ""
        if not text:
            opened = {self.parts.takes: gr.Accordion(open=True)}
            return {self.parts.side: gr.Tabs(selected=SETTINGS_TAB)} | opened
        owner, files = owner_of(request), list[str]()
        if text == QUESTION:
            path = self.service.uploads.new(owner) / DOCUMENT
            path.write_text(sample_document(), encoding="utf-8")
            files.append(str(path))
        return self.say(id, start, query, {"text": text, "files": files}, request)

    def continue_answer(self, id: str, start: int, request: gr.Request) -> Updates:
        """Go on with the last answer."""
        view = self._view(request, id, start)
        return self._do(view, lambda: self.service.continue_answer(view.owner, id))

    def regenerate(self, id: str, start: int, request: gr.Request) -> Updates:
        """Answer the last message again, in another way."""
        view = self._view(request, id, start)
        warmer = {}
        if not self.service.settings_of(view.owner, id).temperature:
            warmer["temperature"] = _WARMER
            gr.Info(
                "At temperature 0 the same answer would come again: this one is drawn at "
                f"{_WARMER}. The settings change it for all answers."
            )
        return self._do(view, lambda: self.service.regenerate(view.owner, id, **warmer))

    def read_again(self, id: str, start: int, request: gr.Request) -> Updates:
        """Have the model in use read what another one has read."""
        view = self._view(request, id, start)
        return self._do(view, lambda: read_again(self.service, view.owner, id))

    def refresh(self, id: str, start: int, request: gr.Request) -> Updates:
        """Show it as another model finds it; what is typed stays."""
        view = self._view(request, id, start)
        if view.under_way is not None:
            return {self.parts.status: gr.skip()}
        failed = view.work is not None and view.work.failure is not None
        told = {} if failed else {self.parts.status: gr.skip()}
        return self._if_shown(view, view.idle(refill=False) | told)

    def edit(self, id: str, start: int, event: gr.EditData, request: gr.Request) -> Updates:
        """Answer a message in other words."""
        view = self._view(request, id, start)
        number = _number_at(view.history, event.index)
        text = str(event.value).strip()
        return self._do(view, lambda: self.service.edit(view.owner, id, number, text))

    def undo(self, id: str, start: int, request: gr.Request) -> Updates:
        """Go back before the last message."""
        view = self._view(request, id, start)
        return self._do(view, lambda: self.service.undo(view.owner, id))

    def branch(self, id: str, start: int, chosen: int, request: gr.Request) -> Updates:
        """Go on from the answer that was chosen."""
        view = self._view(request, id, start)
        return self._do(view, lambda: self.service.branch(view.owner, id, chosen))

    def switch(self, id: str, start: int, branch: int, request: gr.Request) -> Updates:
        """Go to a branch; gradio sends this event more than once."""
        view = self._view(request, id, start)
        work = view.under_way
        if work is not None and work.request.branch == branch:
            return {self.parts.status: gr.skip()}
        return self._do(view, lambda: self.service.switch(view.owner, id, branch))

    def former(self, id: str, start: int, request: gr.Request) -> Updates:
        """Go to the branch before this one."""
        return self.switch(id, start, (self._view(request, id).branch() or 1) - 1, request)

    def later(self, id: str, start: int, request: gr.Request) -> Updates:
        """Go to the branch after this one."""
        return self.switch(id, start, (self._view(request, id).branch() or 1) + 1, request)

    def follow(self, id: str, start: int, stage: str, request: gr.Request) -> Iterator[Updates]:
        """Show what is done for a conversation as it comes. Its outputs are few, as the page goes
        through all of them at every step."""
        view = self._view(request, id, start)
        # Gradio empties the outputs of a generator that yields nothing, and sends what is yielded
        # last once more.
        nothing = {self.parts.chat: gr.skip(), self.parts.status: gr.skip()}
        yield nothing
        if stage != BEGUN:
            return
        with self.tabs.following(view.tab, id, wake=lambda: _nudge(view)) as left:
            # If the record cannot be read any more, `ended` says so.
            with suppress(KvliteError, OSError):
                while not left.is_set() and (work := view.under_way) is not None:
                    yield from self._coming(view, work, left)
            if left.is_set():
                yield nothing
                return
        yield {self.parts.stage: ENDED}

    def _coming(self, view: ConversationView, work: Work, left: Event) -> Iterator[Updates]:
        """What work shows until it has ended, or the tab shows something else."""
        title, above = None, list[dict[str, Any]]()
        for shown in work.follow(self.service.host.pause):
            if left.is_set() or shown.ended:
                return
            if shown.title != title:
                title, above = shown.title, view.history.messages
            coming = answering(shown) if work.request.answered else []
            yield {self.parts.chat: [*above, *coming], self.parts.status: status_html(shown)}

    def ended(
        self, id: str, start: int, stage: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Show all of a conversation, if what was followed has ended; what was typed stays."""
        view = self._view(request, id, start)
        if stage != ENDED:
            return {self.parts.status: gr.skip()}
        work = view.work
        status = "" if work is None else status_html(work.shown)
        try:
            if view.under_way is not None:  # something else has begun
                updates = view.begun()
            else:
                updates = view.idle(status=status, refill=not _typed(said))
                if refusal(work) is not None:
                    # The browser alone knows what is typed meanwhile.
                    gone = [each for each in _files_of(said) if not Path(each).is_file()]
                    updates |= {self.parts.refused: "\n".join(gone)}
        except (KvliteError, OSError) as error:
            updates = view.unreadable(error)
        return self._if_shown(view, updates)

    def check(self, id: str, request: gr.Request) -> Iterator[Any]:
        """Answer the last message from everything, and show how the answer differs."""
        view = self._view(request, id)
        try:
            work = self.service.check(view.owner, id)
        except KvliteError as error:
            yield sentence_html(str(error), wrong=True)
            return
        with self.tabs.following(view.tab, id, "check", work.nudge) as left:
            for shown in work.follow(self.service.host.pause):
                if left.is_set():
                    yield gr.skip()  # what is yielded last is sent once more
                    return
                yield status_html(shown) + view.difference()

    def stop(self, id: str, request: gr.Request) -> None:
        """End what is being done; what has come stays."""
        if (work := self._view(request, id).under_way) is not None:
            work.cancel.set()

    def stop_check(self, id: str, request: gr.Request) -> None:
        """End a check, and nothing else."""
        work = self._view(request, id).under_way
        if work is not None and work.request.check:
            work.cancel.set()

    def choose(
        self, id: str, start: int, event: gr.SelectData, request: gr.Request
    ) -> tuple[Any, Any, Any]:
        """The number of the answer that was clicked on, and what it was made from."""
        view = self._view(request, id, start)
        if not self.tabs.shows(view.tab, id):
            return gr.skip(), gr.skip(), gr.skip()
        shown = view.history
        number = _number_at(shown, event.index)
        keys = zip(shown.numbers, shown.keys, strict=True)
        own = [key for each, key in keys if each == number and number and key]
        account, html = view.account(own[-1] if own else None)
        return number, html, gr.Tabs(selected=ANSWER_TAB) if account else gr.skip()

    def _view(
        self, request: gr.Request, id: str, start: int = 0, query: str = ""
    ) -> ConversationView:
        return ConversationView(self.service, self.parts, request, id, start, query)

    def _there(self, id: str, request: gr.Request) -> str:
        """The id, or a new one where there can be no conversation of this id."""
        store = self.service.store(owner_of(request))
        return id if store.may_be(id) else store.new().id

    def _do(
        self, view: ConversationView, begin: Callable[[], Work], *, empty: bool = False
    ) -> Updates:
        self.tabs.go(view.tab, view.id)
        try:
            begin()
        except (KvliteError, OSError) as error:
            return self._refused(view, error)
        return self._if_shown(view, view.begun(empty=empty))

    def _if_shown(self, view: ConversationView, updates: Updates) -> Updates:
        """The updates, unless another conversation was chosen in this tab meanwhile."""
        return updates if self.tabs.shows(view.tab, view.id) else {self.parts.start: gr.skip()}

    def _taken_out(self, view: ConversationView, left: list[str]) -> Updates:
        """Forget that documents were too long, once they are out of the box."""
        work = view.work
        if work is None or not is_too_long(work) or not work.request.documents or left:
            return {self.parts.start: gr.skip()}
        work.show(error="")
        return self._if_shown(view, view.idle(refill=False))

    def _say_first(self) -> Updates:
        gr.Warning("Type a message first.")
        return {self.parts.start: gr.skip()}

    def _refused(self, view: ConversationView, error: Exception) -> Updates:
        # If something else is being done, that stays shown, and so does what was typed.
        if view.under_way is None:
            status = sentence_html(str(error), wrong=True)
            return self._if_shown(view, view.idle(status=status, refill=False))
        gr.Warning(str(error))
        branch = gr.update(value=view.branch())
        return self._if_shown(view, {self.parts.status: gr.skip(), self.parts.branches: branch})


def _nudge(view: ConversationView) -> None:
    if (work := view.under_way) is not None:
        work.nudge()


def _number_at(shown: History, index: Any) -> int:
    place = index[0] if isinstance(index, list | tuple) else index
    return shown.numbers[place] if 0 <= place < len(shown.numbers) else 0


def _text_of(said: dict[str, Any] | None) -> str:
    return str((said or {}).get("text") or "").strip()


def _files_of(said: dict[str, Any] | None) -> list[str]:
    return [str(file) for file in (said or {}).get("files") or []]


def _typed(said: dict[str, Any] | None) -> bool:
    return bool(_text_of(said) or (said or {}).get("files"))
