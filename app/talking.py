"""What happens when someone says something, or goes back."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from kvlite.documents import Document
from kvlite.errors import KvliteError

from .answer_view import answer_html, difference_html
from .history import History, history
from .inert import inert
from .layout import ANSWER_TAB, Parts
from .record import Record
from .service import Service
from .status import sentence_html, status_html
from .tabs import Tabs
from .uploads import read_upload
from .work import Shown, Work

# New values, by the component that shows them.
View = dict[Any, Any]


class Talking:
    """The page's events about the conversation that is shown."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts
        self.tabs = Tabs()

    def show(self, id: str, request: gr.Request) -> Iterator[View]:
        """Show a conversation, and follow what is being done for it, and nothing else any more."""
        owner, tab = owner_of(request), tab_of(request)
        self.tabs.leave(tab)
        self.tabs.leave(_checks_in(tab))
        shelf = self.service.shelf(owner)
        id = id if id and shelf.has(id) else shelf.new().id
        work = self.service.work_of(owner, id)
        if work is None:
            yield self.view(owner, id)
        else:
            yield from self._follow(owner, id, work, tab)

    def begin(self, request: gr.Request) -> Iterator[View]:
        """Show a new conversation."""
        yield from self.show("", request)

    def say(self, id: str, said: dict[str, Any] | None, request: gr.Request) -> Iterator[View]:
        """Send what is in the box."""
        owner = owner_of(request)
        text = ((said or {}).get("text") or "").strip()
        files = (said or {}).get("files") or []
        if not text and not files:
            yield self.view(owner, id, status=sentence_html("Type a message first.", wrong=True))
            return
        documents, wrong = list[Document](), ""
        for number, file in enumerate(files):
            name = Path(file).name
            doing = Shown(title=f"Opening {name}", done=number, total=len(files))
            yield {self.parts.status: status_html(doing), **self._begun(id)}
            try:
                documents.append(read_upload(str(file)))
            except KvliteError as error:
                wrong = str(error)
                break
        if wrong:
            kept: dict[str, Any] = {"text": text, "files": []}
            yield self.view(owner, id, status=sentence_html(wrong, wrong=True), draft=kept)
            return
        yield from self._do(request, id, lambda: self.service.say(owner, id, text, documents))

    def regenerate(self, id: str, request: gr.Request) -> Iterator[View]:
        """Answer the last message again."""
        owner = owner_of(request)
        yield from self._do(
            request,
            id,
            lambda: self.service.regenerate(owner, id),
            lambda record: replace(record, said=record.said[:-1], draft=""),
        )

    def edit(self, id: str, event: gr.EditData, request: gr.Request) -> Iterator[View]:
        """Say a message in other words."""
        owner = owner_of(request)
        number = _number_at(self._history(owner, id), event.index)
        text = str(event.value).strip()
        before = self._before(owner, id, number)
        yield from self._do(
            request,
            id,
            lambda: self.service.edit(owner, id, number, text),
            lambda record: replace(record, said=record.said[:before], draft=text),
        )

    def undo(self, id: str, request: gr.Request) -> Iterator[View]:
        """Go back before the last message."""
        owner = owner_of(request)
        yield from self._do(request, id, lambda: self.service.undo(owner, id))

    def branch(self, id: str, chosen: int, request: gr.Request) -> Iterator[View]:
        """Go on from an answer that was chosen."""
        owner = owner_of(request)
        yield from self._do(request, id, lambda: self.service.branch(owner, id, chosen))

    def switch(self, id: str, branch: int, request: gr.Request) -> Iterator[View]:
        """Go to a branch."""
        owner = owner_of(request)
        yield from self._do(request, id, lambda: self.service.switch(owner, id, branch))

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
            for shown in work.follow(self.service.pause):
                if left.is_set():
                    return
                yield status_html(shown)
        if shown.ledger is not None and not shown.error:
            former = self.service.shelf(owner).record(id).said[-1].text
            yield status_html(shown) + difference_html(former, shown.text, shown.ledger)

    def stop(self, id: str, request: gr.Request) -> None:
        """End what is being done; what has come stays."""
        work = self.service.work_of(owner_of(request), id)
        if work is not None:
            work.cancel.set()

    def choose(self, id: str, event: gr.SelectData, request: gr.Request) -> tuple[int, str, Any]:
        """Show what the answer that was clicked on was made from; its number."""
        owner = owner_of(request)
        shown = self._history(owner, id)
        if not (number := _number_at(shown, event.index)):
            return 0, answer_html({}, None), gr.skip()
        keys = [
            key for key, own in zip(shown.keys, shown.numbers, strict=True) if own == number and key
        ]
        account = self.service.shelf(owner).account(id, keys[-1]) if keys else {}
        tab = gr.Tabs(selected=ANSWER_TAB) if account else gr.skip()
        return number, answer_html(account, self.service.calibration), tab

    def view(
        self,
        owner: str,
        id: str,
        *,
        status: str = "",
        draft: dict[str, Any] | None = None,
    ) -> View:
        """All that is shown of a conversation while nothing is done for it.

        Args:
            draft: what is put into the box; without it what was typed there meanwhile stays.
        """
        shelf = self.service.shelf(owner)
        record = shelf.record_or_new(id)
        shown = history(replace(record, draft=""), shelf)
        keys = shown.answer_keys()
        if draft is None and record.draft:
            draft = {"text": record.draft, "files": []}
        drafted: dict[str, Any] = {"value": draft} if draft else {}
        branches = [(each.title, number) for number, each in enumerate(record.branches, 1)]
        at = next((n for n, each in enumerate(record.branches, 1) if each.current), None)
        account = shelf.account(id, keys[-1]) if keys else {}
        parts = self.parts
        return self._here(id) | {
            parts.chat: shown.messages,
            parts.status: status,
            parts.box: gr.MultimodalTextbox(submit_btn=True, stop_btn=False, **drafted),
            parts.branches: gr.Dropdown(choices=branches, value=at, visible=len(branches) > 1),
            parts.name: record.title if record.said or record.name else "",
            parts.chosen: record.questions,
            parts.answer: answer_html(account, self.service.calibration),
            parts.difference: "",
        }

    def _do(
        self,
        request: gr.Request,
        id: str,
        begin: Any,
        base: Any = None,
    ) -> Iterator[View]:
        """Begin work and follow it.

        Args:
            begin: makes the work.
            base: of the record, what is shown above the answer that comes.
        """
        owner = owner_of(request)
        try:
            work = begin()
        except (KvliteError, OSError) as error:
            yield self.view(owner, id, status=sentence_html(str(error), wrong=True))
            return
        yield from self._follow(owner, id, work, tab_of(request), base)

    def _follow(
        self, owner: str, id: str, work: Work, tab: str, base: Any = None
    ) -> Iterator[View]:
        shelf, title, above = self.service.shelf(owner), None, History([], [], [])
        begun = self._begun(id)
        if not shelf.record_or_new(id).said:
            begun[self.parts.listing] = gr.Radio(choices=titles(shelf.records()), value=id)
        with self.tabs.following(tab) as left:
            for shown in work.follow(self.service.pause):
                if left.is_set():
                    return
                if shown.ended:
                    break
                if shown.title != title:
                    title = shown.title
                    record = shelf.record_or_new(id)
                    above = history(base(record) if base else record, shelf)
                messages = [*above.messages, *_coming(shown)]
                yield {self.parts.chat: messages, self.parts.status: status_html(shown), **begun}
                begun = {}
            yield self.view(owner, id, status=status_html(work.shown))

    def _here(self, id: str) -> View:
        """That a conversation is the one that is shown."""
        parts = self.parts
        return {parts.here: id, parts.kept_here: id, parts.listing: gr.Radio(value=id)}

    def _begun(self, id: str) -> View:
        """That something is being done for a conversation: the box is empty and offers to stop."""
        box = gr.MultimodalTextbox(value=None, submit_btn=False, stop_btn=True)
        return self._here(id) | {self.parts.box: box}

    def _history(self, owner: str, id: str) -> History:
        shelf = self.service.shelf(owner)
        record = shelf.record_or_new(id)
        return history(replace(record, draft=""), shelf)

    def _before(self, owner: str, id: str, number: int) -> int:
        """How many messages go before the user's of this number."""
        shelf = self.service.shelf(owner)
        said = shelf.record_or_new(id).said
        users = [index for index, each in enumerate(said) if each.role == "user"]
        return users[number - 1] if 1 <= number <= len(users) else len(said)


def _number_at(shown: History, index: Any) -> int:
    """Of the message that is shown at a place, the user's number; 0 if there is none."""
    place = index[0] if isinstance(index, list | tuple) else index
    return shown.numbers[place] if 0 <= place < len(shown.numbers) else 0


def titles(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Conversations as a list has them, each with its id."""
    return [(each.title, each.id) for each in records]


def owner_of(request: gr.Request) -> str:
    """Who is logged in, "" where nobody has to be."""
    return request.username or ""


def tab_of(request: gr.Request) -> str:
    """Which tab asks."""
    return request.session_hash or ""


def _checks_in(tab: str) -> str:
    """A tab may follow a check, which is shown beside the conversation."""
    return f"{tab} check"


def _coming(shown: Shown) -> list[dict[str, Any]]:
    """The answer so far."""
    return [{"role": "assistant", "content": inert(shown.text)}] if shown.text else []
