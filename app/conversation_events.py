"""What happens when someone says something, or goes back."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import gradio as gr

from kvlite.errors import KvliteError, SettingError

from .conversation_view import BEGUN, ENDED, ConversationView, Updates
from .engine.job import Job
from .engine.service import Service
from .engine.work import Work
from .layout import ANSWER_TAB, Parts
from .request_context import RequestContext, owner_of, request_context
from .tabs import Tabs
from .views.answer import answer_html
from .views.history import History, answered
from .views.status import sentence_html, status_html


class ConversationEvents:
    """The page's events about the conversation that is shown: each begins something, which is then
    followed; once it has ended, all is shown anew."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts
        self.view = ConversationView(service, parts)
        self.tabs = Tabs()

    def load(self, id: str, query: str, request: gr.Request) -> Updates:
        """Show the conversation that a browser showed last, unless someone was quicker."""
        context = request_context(request, self._there(id, request), query=query)
        if not self.tabs.arrive(context.tab, context.id):
            return {self.parts.status: gr.skip()}
        return self._if_shown(context, self.view.opened(context))

    def show(
        self, id: str, query: str, here: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Show the end of a conversation, and from now on what is done for it, and for no other.

        Args:
            here: the one that was shown before.
            said: what is in the box. It stays there, unless it is kept with that one.
        """
        context = request_context(request, self._there(id, request), query=query)
        self.tabs.go(context.tab, context.id)
        draft = (
            self.service.record(context.owner, here).draft if here not in ("", context.id) else ""
        )
        empty = bool(draft) and draft == _text_of(said)
        updates = self.view.opened(context, empty=empty, refill=empty or not _typed(said))
        return self._if_shown(context, updates)

    def delete(
        self, id: str, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Remove a conversation, and show a new one."""
        context = request_context(request, id, query=query)
        self.service.forget(context.owner, id)
        if not self.tabs.shows(context.tab, id):
            return {self.parts.status: gr.skip()}
        return self.show("", query, id, said, request)

    def show_all(self, id: str, request: gr.Request) -> Updates:
        """Show the beginning of a long conversation as well."""
        context = request_context(request, id)
        shown = self.view.messages(self.view.history(context))
        return self._if_shown(context, {self.parts.start: 0} | shown)

    def say(
        self, id: str, start: int, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Send what is in the box, as a new conversation's where none is shown yet."""
        id = id or self.service.store(owner_of(request)).new().id
        context = request_context(request, id, start, query)
        text = _text_of(said)
        files = [str(file) for file in (said or {}).get("files") or []]
        if not text and not files:
            return self._if_shown(
                context, self._refused(context, SettingError("Type a message first."))
            )
        return self._do(
            context, lambda: self.service.say(context.owner, id, text, files), empty=True
        )

    def regenerate(self, id: str, start: int, request: gr.Request) -> Updates:
        """Answer the last message again."""
        context = request_context(request, id, start)
        return self._do(context, lambda: self.service.regenerate(context.owner, id))

    def edit(self, id: str, start: int, event: gr.EditData, request: gr.Request) -> Updates:
        """Say a message in other words."""
        context = request_context(request, id, start)
        number = _number_at(self.view.history(context), event.index)
        text = str(event.value).strip()
        return self._do(context, lambda: self.service.edit(context.owner, id, number, text))

    def undo(self, id: str, start: int, request: gr.Request) -> Updates:
        """Go back before the last message."""
        context = request_context(request, id, start)
        return self._do(context, lambda: self.service.undo(context.owner, id))

    def branch(self, id: str, start: int, chosen: int, request: gr.Request) -> Updates:
        """Go on from an answer that was chosen."""
        context = request_context(request, id, start)
        return self._do(context, lambda: self.service.branch(context.owner, id, chosen))

    def switch(self, id: str, start: int, branch: int, request: gr.Request) -> Updates:
        """Go to a branch, of which gradio tells more than once."""
        context = request_context(request, id, start)
        job = self.view.under_way(context)
        if job is not None and job.sent.branch == branch:
            return {self.parts.status: gr.skip()}
        return self._do(context, lambda: self.service.switch(context.owner, id, branch))

    def follow(self, id: str, start: int, stage: str, request: gr.Request) -> Iterator[Updates]:
        """Show what is done for a conversation as it comes: of this event nothing else changes, as
        a page looks at all that may."""
        context = request_context(request, id, start)
        # Of an event that yields nothing gradio empties what it shows, and what is yielded last it
        # sends once more.
        nothing = {self.parts.chat: gr.skip(), self.parts.status: gr.skip()}
        yield nothing
        if stage != BEGUN:
            return
        with self.tabs.following(context.tab, id, wake=lambda: self._nudge(context)) as left:
            # Where what is to be shown cannot be read any more, how it ended says so.
            with suppress(KvliteError, OSError):
                while not left.is_set() and (job := self.view.under_way(context)) is not None:
                    yield from self._coming(context, job, left)
            if left.is_set():
                yield nothing
                return
        yield {self.parts.stage: ENDED}

    def _coming(self, context: RequestContext, job: Job, left: Event) -> Iterator[Updates]:
        """What there is to see until it has ended, or the tab shows something else."""
        title, above = None, list[dict[str, Any]]()
        for shown in job.work.follow(self.service.model_host.pause):
            if left.is_set() or shown.ended:
                return
            if shown.title != title:
                title, above = shown.title, self.view.history(context).messages
            coming = [answered(shown.text)] if shown.text and job.sent.answered else []
            yield {self.parts.chat: [*above, *coming], self.parts.status: status_html(shown)}

    def ended(
        self, id: str, start: int, stage: str, said: dict[str, Any] | None, request: gr.Request
    ) -> Updates:
        """Show all of a conversation, if what was followed has ended; what was typed meanwhile
        stays."""
        context = request_context(request, id, start)
        if stage != ENDED:
            return {self.parts.status: gr.skip()}
        job = self.service.job(context.owner, id)
        status = "" if job is None else status_html(job.work.shown)
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
                if not left.is_set():
                    yield status_html(shown) + self.view.difference(context)
                    continue
                yield gr.skip()  # what is yielded last is sent once more
                return

    def stop(self, id: str, request: gr.Request) -> None:
        """End what is being done; what has come stays."""
        job = self.view.under_way(request_context(request, id))
        if job is not None:
            job.work.cancel.set()

    def stop_check(self, id: str, request: gr.Request) -> None:
        """End a check, and nothing else."""
        job = self.view.under_way(request_context(request, id))
        if job is not None and job.sent.check:
            job.work.cancel.set()

    def choose(
        self, id: str, start: int, event: gr.SelectData, request: gr.Request
    ) -> tuple[Any, Any, Any]:
        """Show what the answer that was clicked on was made from; its number."""
        context = request_context(request, id, start)
        if not self.tabs.shows(context.tab, id):
            return gr.skip(), gr.skip(), gr.skip()
        shown = self.view.history(context)
        if not (number := _number_at(shown, event.index)):
            return 0, answer_html({}, None), gr.skip()
        keys = [
            key for key, own in zip(shown.keys, shown.numbers, strict=True) if own == number and key
        ]
        account = self.service.store(context.owner).account(id, keys[-1]) if keys else {}
        tab = gr.Tabs(selected=ANSWER_TAB) if account else gr.skip()
        return number, answer_html(account, self.service.model_host.calibration), tab

    def _nudge(self, context: RequestContext) -> None:
        """Have whoever follows what is being done look up."""
        if (job := self.view.under_way(context)) is not None:
            job.work.nudge()

    def _there(self, id: str, request: gr.Request) -> str:
        """A conversation, or one that a page has just begun; a new one where there can be none of
        this id."""
        store = self.service.store(owner_of(request))
        return id if store.may_be(id) else store.new().id

    def _do(
        self, context: RequestContext, begin: Callable[[], Work], *, empty: bool = False
    ) -> Updates:
        """Begin work, which is followed then.

        Args:
            empty: whether the box is, then.
        """
        self.tabs.go(context.tab, context.id)
        try:
            begin()
        except (KvliteError, OSError) as error:
            return self._if_shown(context, self._refused(context, error))
        return self._if_shown(context, self.view.begun(context, empty=empty))

    def _if_shown(self, context: RequestContext, updates: Updates) -> Updates:
        """It, unless another conversation was chosen in this tab meanwhile, which stays then."""
        shows = self.tabs.shows(context.tab, context.id)
        return updates if shows else {self.parts.start: gr.skip()}

    def _refused(self, context: RequestContext, error: Exception) -> Updates:
        """Why something cannot be done. While something else is being done, that is shown on, and
        what was typed stays."""
        if self.view.under_way(context) is None:
            status = sentence_html(str(error), wrong=True)
            return self.view.idle(context, status=status, refill=False)
        gr.Warning(str(error))
        at = self.view.branch_at(context)
        return {self.parts.status: gr.skip(), self.parts.branches: gr.update(value=at)}


def _number_at(shown: History, index: Any) -> int:
    """Of the message that is shown at a place, the user's number; 0 if there is none."""
    place = index[0] if isinstance(index, list | tuple) else index
    return shown.numbers[place] if 0 <= place < len(shown.numbers) else 0


def _text_of(said: dict[str, Any] | None) -> str:
    """What is typed in a box."""
    return str((said or {}).get("text") or "").strip()


def _typed(said: dict[str, Any] | None) -> bool:
    """Whether anything is in a box."""
    return bool(_text_of(said) or (said or {}).get("files"))
