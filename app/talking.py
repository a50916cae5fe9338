"""What happens when someone says something, or goes back."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr

from kvlite.errors import KvliteError, SettingError

from .engine.going import Going
from .engine.service import Service
from .engine.work import Work
from .keeping.record import Record, titles
from .layout import ANSWER_TAB, Parts
from .tabs import Tabs
from .views.answer import answer_html, difference_html
from .views.history import History, answered, history, start_of
from .views.status import sentence_html, status_html
from .visit import Visit, owner_of, tab_of, visit_of

# How far what a page's event began has come: it is to be followed, or is to be shown as it ended.
BEGUN, ENDED = "begun", "ended"

# What the box offers.
_IDLE: dict[str, Any] = {"submit_btn": True, "stop_btn": False}
_BUSY: dict[str, Any] = {"submit_btn": False, "stop_btn": True}

# New values, by the component that shows them.
View = dict[Any, Any]


class Talking:
    """The page's events about the conversation that is shown: each begins something, which is then
    followed; once it has ended, all is shown anew."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts
        self.tabs = Tabs()

    def load(self, id: str, query: str, request: gr.Request) -> View:
        """Show the conversation that a browser showed last, unless someone was quicker."""
        visit = visit_of(request, self._there(id, request), query=query)
        if not self.tabs.arrive(visit.tab, visit.id):
            return {self.parts.status: gr.skip()}
        return self._opened(visit)

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
        self.tabs.leave(_checks_in(visit.tab))
        draft = self.service.record(visit.owner, here).draft if here not in ("", visit.id) else ""
        return self._opened(visit, empty=bool(draft) and draft == _text_of(said))

    def begin(
        self, query: str, here: str, said: dict[str, Any] | None, request: gr.Request
    ) -> View:
        """Show a new conversation."""
        return self.show("", query, here, said, request)

    def show_all(self, id: str, request: gr.Request) -> View:
        """Show the beginning of a long conversation as well."""
        return self._messages(self._history(visit_of(request, id))) | {self.parts.start: 0}

    def say(
        self, id: str, start: int, query: str, said: dict[str, Any] | None, request: gr.Request
    ) -> View:
        """Send what is in the box, as a new conversation's where none is shown yet."""
        id = id or self.service.shelf(owner_of(request)).new().id
        visit = visit_of(request, id, start, query)
        text = _text_of(said)
        files = [str(file) for file in (said or {}).get("files") or []]
        if not text and not files:
            return self._refused(visit, SettingError("Type a message first."))
        return self._do(visit, lambda: self.service.say(visit.owner, id, text, files), empty=True)

    def regenerate(self, id: str, start: int, request: gr.Request) -> View:
        """Answer the last message again."""
        visit = visit_of(request, id, start)
        return self._do(visit, lambda: self.service.regenerate(visit.owner, id))

    def edit(self, id: str, start: int, event: gr.EditData, request: gr.Request) -> View:
        """Say a message in other words."""
        visit = visit_of(request, id, start)
        number = _number_at(self._history(visit), event.index)
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
        going = self.service.going(visit.owner, id)
        if going is not None and not going.ended and going.sent.branch == branch:
            return {self.parts.status: gr.skip()}
        return self._do(visit, lambda: self.service.switch(visit.owner, id, branch))

    def follow(self, id: str, start: int, stage: str, request: gr.Request) -> Iterator[View]:
        """Show what is done for a conversation as it comes: of this event nothing else changes, as
        a page looks at all that may."""
        visit = visit_of(request, id, start)
        going = self.service.going(visit.owner, id)
        # Of an event that yields nothing gradio empties what it shows, and what is yielded last it
        # sends once more.
        nothing = {self.parts.chat: gr.skip(), self.parts.status: gr.skip()}
        yield nothing
        if stage != BEGUN:
            return
        if going is not None and not going.ended:
            with self.tabs.following(visit.tab, id) as left:
                # Where what is to be shown cannot be read any more, how it ended says so.
                with suppress(KvliteError, OSError):
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
                title, above = shown.title, self._history(visit).messages
            coming = [answered(shown.text)] if shown.text and going.sent.answered else []
            yield {self.parts.chat: [*above, *coming], self.parts.status: status_html(shown)}

    def ended(self, id: str, start: int, query: str, stage: str, request: gr.Request) -> View:
        """Show all of a conversation, if what was followed has ended."""
        visit = visit_of(request, id, start, query)
        going = self.service.going(visit.owner, id)
        if stage != ENDED:
            return {self.parts.status: gr.skip()}
        status = "" if going is None else status_html(going.work.shown)
        try:
            view = self.view(visit, status=status)
        except (KvliteError, OSError) as error:
            box = gr.MultimodalTextbox(**_IDLE)
            status = sentence_html(str(error), wrong=True)
            view = {self.parts.stage: "", self.parts.box: box, self.parts.status: status}
        return self._if_shown(visit, view)

    def check(self, id: str, request: gr.Request) -> Iterator[str]:
        """Answer the last message from everything, and show how the answer differs."""
        owner = owner_of(request)
        try:
            work = self.service.check(owner, id)
        except KvliteError as error:
            yield sentence_html(str(error), wrong=True)
            return
        shown = work.shown
        with self.tabs.following(_checks_in(tab_of(request))) as left:
            for shown in work.follow(self.service.loaded.pause):
                if left.is_set():
                    return
                yield status_html(shown)
        if shown.ledger is not None and not shown.error:
            former = self.service.record(owner, id).said[-1].text
            yield status_html(shown) + difference_html(former, shown.text, shown.ledger)

    def stop(self, id: str, request: gr.Request) -> None:
        """End what is being done; what has come stays."""
        work = self.service.work_of(owner_of(request), id)
        if work is not None:
            work.cancel.set()

    def choose(
        self, id: str, start: int, event: gr.SelectData, request: gr.Request
    ) -> tuple[int, str, Any]:
        """Show what the answer that was clicked on was made from; its number."""
        visit = visit_of(request, id, start)
        shown = self._history(visit)
        if not (number := _number_at(shown, event.index)):
            return 0, answer_html({}, None), gr.skip()
        keys = [
            key for key, own in zip(shown.keys, shown.numbers, strict=True) if own == number and key
        ]
        account = self.service.shelf(visit.owner).account(id, keys[-1]) if keys else {}
        tab = gr.Tabs(selected=ANSWER_TAB) if account else gr.skip()
        return number, answer_html(account, self.service.loaded.calibration), tab

    def view(
        self, visit: Visit, *, status: str = "", refill: bool = True, empty: bool = False
    ) -> View:
        """All that is shown of a conversation while nothing is done for it.

        Args:
            refill: whether a message that was not answered comes into the box.
            empty: whether what is there goes otherwise.
        """
        shelf, record = self.service.shelf(visit.owner), self.service.record(visit.owner, visit.id)
        start = start_of(record.said, visit.start)
        shown = history(replace(record, draft=""), shelf, start)
        keys = shown.answer_keys()
        branches = [(each.title, number) for number, each in enumerate(record.branches, 1)]
        account = shelf.account(visit.id, keys[-1]) if keys else {}
        parts = self.parts
        return (
            self._here(visit.id)
            | self._messages(shown)
            | {
                parts.start: start,
                parts.stage: "",
                parts.status: status,
                parts.box: gr.MultimodalTextbox(
                    **_IDLE | _emptied(empty) | (self._unanswered(visit, record) if refill else {})
                ),
                parts.branches: gr.Dropdown(
                    choices=branches, value=record.branch, visible=len(branches) > 1
                ),
                parts.name: record.title if record.said or record.name else "",
                parts.chosen: record.questions,
                parts.answer: answer_html(account, self.service.loaded.calibration),
                parts.difference: "",
            }
        )

    def _unanswered(self, visit: Visit, record: Record) -> dict[str, Any]:
        """A message that was sent and has no answer, for the box; its files too, unless they were
        read. Nothing while there may be one yet."""
        going = self.service.going(visit.owner, visit.id)
        if going is not None and not going.ended:
            return {}
        files = [each for each in going.sent.files if Path(each).is_file()] if going else []
        return {"value": {"text": record.draft, "files": files}} if record.draft or files else {}

    def _there(self, id: str, request: gr.Request) -> str:
        """A conversation, or a new one where there is none of this id."""
        shelf = self.service.shelf(owner_of(request))
        return id if shelf.has(id) else shelf.new().id

    def _opened(self, visit: Visit, *, empty: bool = False) -> View:
        """The end of a conversation, and what is done for it."""
        said = self.service.record(visit.owner, visit.id).said
        visit = replace(visit, start=start_of(said))
        busy = self.service.work_of(visit.owner, visit.id) is not None
        view = self._begun(visit, empty=empty) if busy else self.view(visit, empty=empty)
        return self._if_shown(visit, view)

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
        return self._if_shown(visit, self._begun(visit, empty=empty))

    def _if_shown(self, visit: Visit, view: View) -> View:
        """It, unless another conversation was chosen in this tab meanwhile, which stays then."""
        shows = self.tabs.shows(visit.tab, visit.id)
        return view if shows else {self.parts.status: gr.skip()}

    def _refused(self, visit: Visit, error: Exception) -> View:
        """Why something cannot be done. While something else is being done, that is shown on, and
        what was typed stays."""
        if self.service.work_of(visit.owner, visit.id) is None:
            status = sentence_html(str(error), wrong=True)
            return self.view(visit, status=status, refill=False)
        gr.Warning(str(error))
        at = self._branch_at(visit)
        return {self.parts.status: gr.skip(), self.parts.branches: gr.update(value=at)}

    def _branch_at(self, visit: Visit) -> int | None:
        """The branch that a conversation is on, or goes to."""
        going = self.service.going(visit.owner, visit.id)
        if going is not None and not going.ended and going.sent.branch is not None:
            return going.sent.branch
        return self.service.record(visit.owner, visit.id).branch

    def _here(self, id: str) -> View:
        """That a conversation is the one that is shown."""
        parts = self.parts
        return {parts.here: id, parts.kept_here: id, parts.listing: gr.Radio(value=id)}

    def _begun(self, visit: Visit, *, empty: bool = False) -> View:
        """That something is being done for a conversation: the box offers to stop it, and nothing
        changes how much of it is shown."""
        parts, view = self.parts, self._here(visit.id)
        if not self.service.record(visit.owner, visit.id).said:  # it may be new to the list
            listed = titles(self.service.shelf(visit.owner).records(visit.query))
            view[parts.listing] = gr.Radio(choices=listed, value=visit.id, info="")
        return view | {
            parts.chat: self._history(visit).messages,
            parts.start: visit.start,
            parts.stage: BEGUN,
            parts.box: gr.MultimodalTextbox(**_BUSY | _emptied(empty)),
            parts.earlier: gr.Button(visible=False),
        }

    def _messages(self, shown: History) -> View:
        """Messages, and that there are others before them."""
        said = f"Show {shown.before:,} earlier question{'s' * (shown.before > 1)}"
        return {
            self.parts.chat: shown.messages,
            self.parts.earlier: gr.Button(said, visible=shown.before > 0),
        }

    def _history(self, visit: Visit) -> History:
        """What is shown of a conversation now, but for the answer that comes."""
        shelf = self.service.shelf(visit.owner)
        return history(self.service.shown(visit.owner, visit.id), shelf, visit.start)


def _number_at(shown: History, index: Any) -> int:
    """Of the message that is shown at a place, the user's number; 0 if there is none."""
    place = index[0] if isinstance(index, list | tuple) else index
    return shown.numbers[place] if 0 <= place < len(shown.numbers) else 0


def _text_of(said: dict[str, Any] | None) -> str:
    """What is typed in a box."""
    return str((said or {}).get("text") or "").strip()


def _emptied(empty: bool) -> dict[str, Any]:
    """What a box is told, if it is to be."""
    return {"value": None} if empty else {}


def _checks_in(tab: str) -> str:
    """A tab may follow a check, which is shown beside the conversation."""
    return f"{tab} check"
