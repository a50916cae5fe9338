"""What happens when someone says something, or goes back."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import gradio as gr

from kvlite.errors import KvliteError, SettingError

from .engine.going import Going
from .engine.service import Service
from .engine.work import Work
from .layout import ANSWER_TAB, Parts
from .showing import BEGUN, ENDED, Showing, View
from .tabs import Tabs
from .views.answer import answer_html
from .views.history import History, answered
from .views.status import sentence_html, status_html
from .visit import Visit, owner_of, visit_of


class Talking:
    """The page's events about the conversation that is shown: each begins something, which is then
    followed; once it has ended, all is shown anew."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts
        self.showing = Showing(service, parts)
        self.tabs = Tabs()

    def load(self, id: str, query: str, request: gr.Request) -> View:
        """Show the conversation that a browser showed last, unless someone was quicker."""
        visit = visit_of(request, self._there(id, request), query=query)
        if not self.tabs.arrive(visit.tab, visit.id):
            return {self.parts.status: gr.skip()}
        return self._if_shown(visit, self.showing.opened(visit))

    def show(
        self, id: str, query: str, here: str, said: dict[str, Any] | None, request: gr.Request
    ) -> View:
        """Show the end of a conversation, and from now on what is done for it, and for no other.

        Args:
            here: the one that was shown before.
            said: what is in the box. It stays there, unless it is kept with that one.
        """
        visit = visit_of(request, self._there(id, request), query=query)
        self.tabs.go(visit.tab, visit.id)
        draft = self.service.record(visit.owner, here).draft if here not in ("", visit.id) else ""
        empty = bool(draft) and draft == _text_of(said)
        view = self.showing.opened(visit, empty=empty, refill=empty or not _typed(said))
        return self._if_shown(visit, view)

    def delete(self, id: str, query: str, said: dict[str, Any] | None, request: gr.Request) -> View:
        """Remove a conversation, and show a new one."""
        visit = visit_of(request, id, query=query)
        self.service.forget(visit.owner, id)
        if not self.tabs.shows(visit.tab, id):
            return {self.parts.status: gr.skip()}
        return self.show("", query, id, said, request)

    def show_all(self, id: str, request: gr.Request) -> View:
        """Show the beginning of a long conversation as well."""
        visit = visit_of(request, id)
        shown = self.showing.messages(self.showing.history(visit))
        return self._if_shown(visit, {self.parts.start: 0} | shown)

    def say(
        self, id: str, start: int, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> View:
        """Send what is in the box, as a new conversation's where none is shown yet."""
        id = id or self.service.shelf(owner_of(request)).new().id
        visit = visit_of(request, id, start, query)
        text = _text_of(said)
        files = [str(file) for file in (said or {}).get("files") or []]
        if not text and not files:
            return self._if_shown(
                visit, self._refused(visit, SettingError("Type a message first."))
            )
        return self._do(visit, lambda: self.service.say(visit.owner, id, text, files), empty=True)

    def regenerate(self, id: str, start: int, request: gr.Request) -> View:
        """Answer the last message again."""
        visit = visit_of(request, id, start)
        return self._do(visit, lambda: self.service.regenerate(visit.owner, id))

    def edit(self, id: str, start: int, event: gr.EditData, request: gr.Request) -> View:
        """Say a message in other words."""
        visit = visit_of(request, id, start)
        number = _number_at(self.showing.history(visit), event.index)
        text = str(event.value).strip()
        return self._do(visit, lambda: self.service.edit(visit.owner, id, number, text))

    def undo(self, id: str, start: int, request: gr.Request) -> View:
        """Go back before the last message."""
        visit = visit_of(request, id, start)
        return self._do(visit, lambda: self.service.undo(visit.owner, id))

    def branch(self, id: str, start: int, chosen: int, request: gr.Request) -> View:
        """Go on from an answer that was chosen."""
        visit = visit_of(request, id, start)
        return self._do(visit, lambda: self.service.branch(visit.owner, id, chosen))

    def switch(self, id: str, start: int, branch: int, request: gr.Request) -> View:
        """Go to a branch, of which gradio tells more than once."""
        visit = visit_of(request, id, start)
        going = self.showing.under_way(visit)
        if going is not None and going.sent.branch == branch:
            return {self.parts.status: gr.skip()}
        return self._do(visit, lambda: self.service.switch(visit.owner, id, branch))

    def follow(self, id: str, start: int, stage: str, request: gr.Request) -> Iterator[View]:
        """Show what is done for a conversation as it comes: of this event nothing else changes, as
        a page looks at all that may."""
        visit = visit_of(request, id, start)
        # Of an event that yields nothing gradio empties what it shows, and what is yielded last it
        # sends once more.
        nothing = {self.parts.chat: gr.skip(), self.parts.status: gr.skip()}
        yield nothing
        if stage != BEGUN:
            return
        with self.tabs.following(visit.tab, id, wake=lambda: self._nudge(visit)) as left:
            # Where what is to be shown cannot be read any more, how it ended says so.
            with suppress(KvliteError, OSError):
                while not left.is_set() and (going := self.showing.under_way(visit)) is not None:
                    yield from self._coming(visit, going, left)
            if left.is_set():
                yield nothing
                return
        yield {self.parts.stage: ENDED}

    def _coming(self, visit: Visit, going: Going, left: Event) -> Iterator[View]:
        """What there is to see until it has ended, or the tab shows something else."""
        title, above = None, list[dict[str, Any]]()
        for shown in going.work.follow(self.service.loaded.pause):
            if left.is_set() or shown.ended:
                return
            if shown.title != title:
                title, above = shown.title, self.showing.history(visit).messages
            coming = [answered(shown.text)] if shown.text and going.sent.answered else []
            yield {self.parts.chat: [*above, *coming], self.parts.status: status_html(shown)}

    def ended(
        self, id: str, start: int, stage: str, said: dict[str, Any] | None, request: gr.Request
    ) -> View:
        """Show all of a conversation, if what was followed has ended; what was typed meanwhile
        stays."""
        visit = visit_of(request, id, start)
        if stage != ENDED:
            return {self.parts.status: gr.skip()}
        going = self.service.going(visit.owner, id)
        status = "" if going is None else status_html(going.work.shown)
        try:
            if self.showing.under_way(visit) is not None:  # something else has begun
                view = self.showing.begun(visit)
            else:
                view = self.showing.idle(visit, status=status, refill=not _typed(said))
        except (KvliteError, OSError) as error:
            view = self.showing.unreadable(error)
        return self._if_shown(visit, view)

    def check(self, id: str, request: gr.Request) -> Iterator[Any]:
        """Answer the last message from everything, and show how the answer differs."""
        visit = visit_of(request, id)
        try:
            work = self.service.check(visit.owner, id)
        except KvliteError as error:
            yield sentence_html(str(error), wrong=True)
            return
        with self.tabs.following(visit.tab, id, "check", work.nudge) as left:
            for shown in work.follow(self.service.loaded.pause):
                if not left.is_set():
                    yield status_html(shown) + self.showing.difference(visit)
                    continue
                yield gr.skip()  # what is yielded last is sent once more
                return

    def stop(self, id: str, request: gr.Request) -> None:
        """End what is being done; what has come stays."""
        going = self.showing.under_way(visit_of(request, id))
        if going is not None:
            going.work.cancel.set()

    def stop_check(self, id: str, request: gr.Request) -> None:
        """End a check, and nothing else."""
        going = self.showing.under_way(visit_of(request, id))
        if going is not None and going.sent.check:
            going.work.cancel.set()

    def choose(
        self, id: str, start: int, event: gr.SelectData, request: gr.Request
    ) -> tuple[Any, Any, Any]:
        """Show what the answer that was clicked on was made from; its number."""
        visit = visit_of(request, id, start)
        if not self.tabs.shows(visit.tab, id):
            return gr.skip(), gr.skip(), gr.skip()
        shown = self.showing.history(visit)
        if not (number := _number_at(shown, event.index)):
            return 0, answer_html({}, None), gr.skip()
        keys = [
            key for key, own in zip(shown.keys, shown.numbers, strict=True) if own == number and key
        ]
        account = self.service.shelf(visit.owner).account(id, keys[-1]) if keys else {}
        tab = gr.Tabs(selected=ANSWER_TAB) if account else gr.skip()
        return number, answer_html(account, self.service.loaded.calibration), tab

    def _nudge(self, visit: Visit) -> None:
        """Have whoever follows what is being done look up."""
        if (going := self.showing.under_way(visit)) is not None:
            going.work.nudge()

    def _there(self, id: str, request: gr.Request) -> str:
        """A conversation, or one that a page has just begun; a new one where there can be none of
        this id."""
        shelf = self.service.shelf(owner_of(request))
        return id if shelf.may_be(id) else shelf.new().id

    def _do(self, visit: Visit, begin: Callable[[], Work], *, empty: bool = False) -> View:
        """Begin work, which is followed then.

        Args:
            empty: whether the box is, then.
        """
        self.tabs.go(visit.tab, visit.id)
        try:
            begin()
        except (KvliteError, OSError) as error:
            return self._if_shown(visit, self._refused(visit, error))
        return self._if_shown(visit, self.showing.begun(visit, empty=empty))

    def _if_shown(self, visit: Visit, view: View) -> View:
        """It, unless another conversation was chosen in this tab meanwhile, which stays then."""
        shows = self.tabs.shows(visit.tab, visit.id)
        return view if shows else {self.parts.start: gr.skip()}

    def _refused(self, visit: Visit, error: Exception) -> View:
        """Why something cannot be done. While something else is being done, that is shown on, and
        what was typed stays."""
        if self.showing.under_way(visit) is None:
            status = sentence_html(str(error), wrong=True)
            return self.showing.idle(visit, status=status, refill=False)
        gr.Warning(str(error))
        at = self.showing.branch_at(visit)
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
