"""What happens when someone sends a message, goes back, or shows a conversation."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import gradio as gr

from kvlite.errors import KvliteError, SettingError

from .conversation_view import BEGUN, ENDED, ConversationView, Updates
from .engine.service import Service
from .engine.work import Work
from .layout import ANSWER_TAB, Parts
from .request_context import RequestContext, owner_of, request_context
from .tabs import Tabs
from .views.history import History, answered
from .views.status import sentence_html, status_html


class ConversationEvents:
    """The page's events about the conversation that is shown. Each begins something, `follow` shows
    it as it comes, and `ended` shows all anew."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts
        self.view = ConversationView(service, parts)
        self.tabs = Tabs()

    def load(self, id: str, query: str, request: gr.Request) -> Updates:
        """Show the conversation that a browser showed last, unless its user was quicker."""
        context = request_context(request, self._there(id, request), query=query)
        if not self.tabs.arrive(context.tab, context.id):
            return {self.parts.status: gr.skip()}
        return self._if_shown(context, self.view.opened(context))

    def show(
        self, id: str, query: str, here: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Show the end of a conversation, and from now on what is done for it and no other. What
        was `said` stays in the box, unless it is the draft of the one that was shown (`here`)."""
        context = request_context(request, self._there(id, request), query=query)
        self.tabs.go(context.tab, context.id)
        left = here not in ("", context.id)
        draft = self.service.record(context.owner, here).draft if left else ""
        empty = bool(draft) and draft == _text_of(said)
        updates = self.view.opened(context, empty=empty, refill=empty or not _typed(said))
        return self._if_shown(context, updates)

    def delete(
        self, id: str, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Delete a conversation, and show a new one."""
        context = request_context(request, id, query=query)
        self.service.forget(context.owner, id)
        if not self.tabs.shows(context.tab, id):
            return {self.parts.status: gr.skip()}
        return self.show("", query, id, said, request)

    def show_all(self, id: str, request: gr.Request) -> Updates:
        """Show the beginning of a long conversation too."""
        context = request_context(request, id)
        shown = self.view.messages(self.view.history(context))
        return self._if_shown(context, {self.parts.start: 0} | shown)

    def say(
        self, id: str, start: int, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Send what is in the box, to a new conversation where none is shown yet."""
        id = id or self.service.store(owner_of(request)).new().id
        context = request_context(request, id, start, query)
        text = _text_of(said)
        files = [str(file) for file in (said or {}).get("files") or []]
        if not text and not files:
            refused = self._refused(context, SettingError("Type a message first."))
            return self._if_shown(context, refused)
        return self._do(
            context, lambda: self.service.say(context.owner, id, text, files), empty=True
        )

    def regenerate(self, id: str, start: int, request: gr.Request) -> Updates:
        """Answer the last message again."""
        context = request_context(request, id, start)
        return self._do(context, lambda: self.service.regenerate(context.owner, id))

    def edit(self, id: str, start: int, event: gr.EditData, request: gr.Request) -> Updates:
        """Answer a message in other words."""
        context = request_context(request, id, start)
        number = _number_at(self.view.history(context), event.index)
        text = str(event.value).strip()
        return self._do(context, lambda: self.service.edit(context.owner, id, number, text))

    def undo(self, id: str, start: int, request: gr.Request) -> Updates:
        """Go back before the last message."""
        context = request_context(request, id, start)
        return self._do(context, lambda: self.service.undo(context.owner, id))

    def branch(self, id: str, start: int, chosen: int, request: gr.Request) -> Updates:
        """Go on from the answer that was chosen."""
        context = request_context(request, id, start)
        return self._do(context, lambda: self.service.branch(context.owner, id, chosen))

    def switch(self, id: str, start: int, branch: int, request: gr.Request) -> Updates:
        """Go to a branch; gradio sends this event more than once."""
        context = request_context(request, id, start)
        work = self.view.under_way(context)
        if work is not None and work.request.branch == branch:
            return {self.parts.status: gr.skip()}
        return self._do(context, lambda: self.service.switch(context.owner, id, branch))

    def follow(self, id: str, start: int, stage: str, request: gr.Request) -> Iterator[Updates]:
        """Show what is done for a conversation as it comes. Its outputs are few, as the page goes
        through all of them at every step."""
        context = request_context(request, id, start)
        # Gradio empties the outputs of a generator that yields nothing, and sends what is yielded
        # last once more.
        nothing = {self.parts.chat: gr.skip(), self.parts.status: gr.skip()}
        yield nothing
        if stage != BEGUN:
            return
        with self.tabs.following(context.tab, id, wake=lambda: self._nudge(context)) as left:
            # If the record cannot be read any more, `ended` says so.
            with suppress(KvliteError, OSError):
                while not left.is_set() and (work := self.view.under_way(context)) is not None:
                    yield from self._coming(context, work, left)
            if left.is_set():
                yield nothing
                return
        yield {self.parts.stage: ENDED}

    def _coming(self, context: RequestContext, work: Work, left: Event) -> Iterator[Updates]:
        """What work shows until it has ended, or the tab shows something else."""
        title, above = None, list[dict[str, Any]]()
        for shown in work.follow(self.service.model_host.pause):
            if left.is_set() or shown.ended:
                return
            if shown.title != title:
                title, above = shown.title, self.view.history(context).messages
            coming = [answered(shown.text)] if shown.text and work.request.answered else []
            yield {self.parts.chat: [*above, *coming], self.parts.status: status_html(shown)}

    def ended(
        self, id: str, start: int, stage: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Show all of a conversation, if what was followed has ended; what was typed meanwhile
        stays."""
        context = request_context(request, id, start)
        if stage != ENDED:
            return {self.parts.status: gr.skip()}
        work = self.service.work_for(context.owner, id)
        status = "" if work is None else status_html(work.shown)
        try:
            if self.view.under_way(context) is not None:  # something else has begun
                updates = self.view.begun(context)
            else:
                updates = self.view.idle(context, status=status, refill=not _typed(said))
        except (KvliteError, OSError) as error:
            updates = self.view.unreadable(error)
        return self._if_shown(context, updates)

    def check(self, id: str, request: gr.Request) -> Iterator[Any]:
        """Answer the last message from everything, and show how the answer differs."""
        context = request_context(request, id)
        try:
            work = self.service.check(context.owner, id)
        except KvliteError as error:
            yield sentence_html(str(error), wrong=True)
            return
        with self.tabs.following(context.tab, id, "check", work.nudge) as left:
            for shown in work.follow(self.service.model_host.pause):
                if left.is_set():
                    yield gr.skip()  # what is yielded last is sent once more
                    return
                yield status_html(shown) + self.view.difference(context)

    def stop(self, id: str, request: gr.Request) -> None:
        """End what is being done; what has come stays."""
        work = self.view.under_way(request_context(request, id))
        if work is not None:
            work.cancel.set()

    def stop_check(self, id: str, request: gr.Request) -> None:
        """End a check, and nothing else."""
        work = self.view.under_way(request_context(request, id))
        if work is not None and work.request.check:
            work.cancel.set()

    def choose(
        self, id: str, start: int, event: gr.SelectData, request: gr.Request
    ) -> tuple[Any, Any, Any]:
        """The number of the answer that was clicked on, and what it was made from."""
        context = request_context(request, id, start)
        if not self.tabs.shows(context.tab, id):
            return gr.skip(), gr.skip(), gr.skip()
        shown = self.view.history(context)
        number = _number_at(shown, event.index)
        keys = zip(shown.numbers, shown.keys, strict=True)
        own = [key for each, key in keys if each == number and number and key]
        account, html = self.view.account(context, own[-1] if own else None)
        return number, html, gr.Tabs(selected=ANSWER_TAB) if account else gr.skip()

    def _nudge(self, context: RequestContext) -> None:
        if (work := self.view.under_way(context)) is not None:
            work.nudge()

    def _there(self, id: str, request: gr.Request) -> str:
        """The id, or a new one where there can be no conversation of this id."""
        store = self.service.store(owner_of(request))
        return id if store.may_be(id) else store.new().id

    def _do(
        self, context: RequestContext, begin: Callable[[], Work], *, empty: bool = False
    ) -> Updates:
        """Begin work to follow, with the box emptied if so asked."""
        self.tabs.go(context.tab, context.id)
        try:
            begin()
        except (KvliteError, OSError) as error:
            return self._if_shown(context, self._refused(context, error))
        return self._if_shown(context, self.view.begun(context, empty=empty))

    def _if_shown(self, context: RequestContext, updates: Updates) -> Updates:
        """The updates, unless another conversation was chosen in this tab meanwhile."""
        shows = self.tabs.shows(context.tab, context.id)
        return updates if shows else {self.parts.start: gr.skip()}

    def _refused(self, context: RequestContext, error: Exception) -> Updates:
        """Why something cannot be done. If something else is being done, that stays shown, and so
        does what was typed."""
        if self.view.under_way(context) is None:
            status = sentence_html(str(error), wrong=True)
            return self.view.idle(context, status=status, refill=False)
        gr.Warning(str(error))
        at = self.view.branch_at(context)
        return {self.parts.status: gr.skip(), self.parts.branches: gr.update(value=at)}


def _number_at(shown: History, index: Any) -> int:
    """The number of the user's message that the one shown at a place belongs to; 0 for none."""
    place = index[0] if isinstance(index, list | tuple) else index
    return shown.numbers[place] if 0 <= place < len(shown.numbers) else 0


def _text_of(said: dict[str, Any] | None) -> str:
    return str((said or {}).get("text") or "").strip()


def _typed(said: dict[str, Any] | None) -> bool:
    return bool(_text_of(said) or (said or {}).get("files"))
