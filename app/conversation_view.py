"""What the page shows of a conversation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from kvlite.conversation.library import Library
from kvlite.conversation.record import Record
from kvlite.errors import Stopped
from kvlite.web.work import Work

from .engine.service import Service
from .layout import Parts
from .sidebar_events import listing_of
from .tabs import owner_of
from .views.answer import answer_html, difference_html
from .views.history import History, history, start_of
from .views.status import sentence_html

# The stage of what an event began: it is to be followed, or to be shown as it ended.
BEGUN, ENDED = "begun", "ended"

# What the box offers.
_IDLE: dict[str, Any] = {"submit_btn": True, "stop_btn": False}
_BUSY: dict[str, Any] = {"submit_btn": False, "stop_btn": True}
_AHEAD: dict[str, Any] = {"submit_btn": True, "stop_btn": True}
_EMPTY: dict[str, Any] = {"value": None}
# Why an answer ended that can go on.
_CUT = ("interrupted", "length")

# New values, by the component that shows them.
Updates = dict[Any, Any]


class ConversationView:
    """A conversation for the one who asks, as updates of a page that does not show its first
    `start` messages, and searches for conversations by a `query`."""

    def __init__(
        self,
        service: Service,
        parts: Parts,
        request: gr.Request,
        id: str,
        start: int = 0,
        query: str = "",
    ) -> None:
        self.service, self.parts = service, parts
        self.owner, self.tab = owner_of(request), request.session_hash or ""
        self.id, self.start, self.query = id, start, query

    @property
    def store(self) -> Library:
        """The user's conversations."""
        return self.service.store(self.owner)

    @property
    def record(self) -> Record:
        """Its record now."""
        return self.service.record(self.owner, self.id)

    @property
    def under_way(self) -> Work | None:
        """What is being done for it now."""
        return self.service.under_way(self.owner, self.id)

    @property
    def work(self) -> Work | None:
        """What is being done for it, or was done last."""
        return self.service.work_for(self.owner, self.id)

    @property
    def history(self) -> History:
        """The messages shown now, without the answer that is coming."""
        record, work = self.service.shown(self.owner, self.id), self.under_way
        ahead = work is not None and work.request.ahead is not None
        reading = work.request.documents if work is not None and ahead else ()
        return history(record, self.store, self.start, reading)

    def opened(self, *, empty: bool = False, refill: bool = True) -> Updates:
        """Its end, and what is done for it; arguments are those of `idle`."""
        record = self.record
        self.start = start_of(record.said)
        if self.under_way is None:
            return self.idle(empty=empty, refill=refill, status=self._refusal(record))
        return self._around(record, self.history) | self.begun(empty=empty)

    def idle(self, *, status: str = "", refill: bool = True, empty: bool = False) -> Updates:
        """All of it while nothing is done for it. With `refill` a message without an answer is put
        into the box; with `empty` it is emptied otherwise."""
        parts, record = self.parts, self.record
        self.start = start_of(record.said, self.start)
        shown = history(replace(record, draft=""), self.store, self.start)
        box = _IDLE | (_EMPTY if empty else {})
        if refill:
            box |= self._unanswered(record)
        return (
            {parts.here: self.id, parts.kept_here: self.id}
            | self.messages(shown)
            | self._around(record, shown)
            | {
                parts.start: self.start,
                parts.stage: "",
                parts.status: status,
                parts.box: gr.MultimodalTextbox(**box),
            }
        )

    def begun(self, *, empty: bool = False) -> Updates:
        """It while something is done for it: the box offers to stop that, and nothing changes how
        many messages are shown."""
        parts, work = self.parts, self.under_way
        box = _AHEAD if work is not None and work.request.ahead is not None else _BUSY
        return {
            parts.here: self.id,
            parts.kept_here: self.id,
            parts.listed: listing_of(self.service, self.owner, self.query),
            parts.chat: self.history.messages,
            parts.start: self.start,
            parts.stage: BEGUN,
            parts.box: gr.MultimodalTextbox(**box | (_EMPTY if empty else {})),
            parts.earlier: gr.Button(visible=False),
            parts.go_on: gr.Button(visible=False),
            **parts.reader.hidden(),
            **parts.too_long.hidden(),
        }

    def unreadable(self, error: Exception) -> Updates:
        """Why it cannot be shown."""
        return {
            self.parts.stage: "",
            self.parts.box: gr.MultimodalTextbox(**_IDLE),
            self.parts.status: sentence_html(str(error), wrong=True),
        }

    def messages(self, shown: History) -> Updates:
        """Messages, and how many come before them."""
        said = f"Show {shown.before:,} earlier question{'s' * (shown.before > 1)}"
        return {
            self.parts.chat: shown.messages,
            self.parts.earlier: gr.Button(said, visible=shown.before > 0),
        }

    def account(self, key: str | None) -> tuple[dict[str, Any], str]:
        """The account of an answer, empty where there is none; and as HTML."""
        account = self.store.account(self.id, key) if key else {}
        return account, answer_html(account)

    def difference(self) -> str:
        """The result of a check of the last answer, if that is what was done last."""
        work = self.work
        if work is None or not (work.request.check and work.shown.ended):
            return ""
        shown, said = work.shown, self.record.said
        if shown.error or shown.metrics is None or not said:
            return ""
        return difference_html(said[-1].text, shown.text, shown.metrics)

    def branch(self) -> int | None:
        """The branch that it is on, or goes to."""
        work = self.under_way
        if work is not None and work.request.branch is not None:
            return work.request.branch
        return self.record.branch

    def _around(self, record: Record, shown: History) -> Updates:
        keys, parts = shown.answer_keys(), self.parts
        account, html = self.account(keys[-1] if keys else None)
        count = len(record.branches)
        branches = [
            (f"{number}/{count} \u00b7 {each.title}", number)
            for number, each in enumerate(record.branches, 1)
        ]
        current, several = record.branch or 1, count > 1
        begun = record.said or record.waiting or record.name
        return {
            parts.former: gr.Button(visible=several, interactive=current > 1),
            parts.branches: gr.Dropdown(choices=branches, value=record.branch, visible=several),
            parts.later: gr.Button(visible=several, interactive=current < count),
            parts.name: record.title if begun else "",
            parts.chosen: record.questions,
            parts.model: self.service.model_name,
            parts.go_on: gr.Button(visible=self._goes_on(account)),
            parts.answer: html,
            parts.difference: self.difference(),
            **parts.reader.updates(self.service, self.owner, self.id),
            **parts.too_long.updates(self.service, self.owner, self.id),
        }

    def _goes_on(self, account: dict[str, Any]) -> bool:
        ledger = account.get("ledger", {})
        if ledger.get("limit") == "context":
            settings = self.service.settings_of(self.owner, self.id)
            return settings.beyond_context == "compact"
        return ledger.get("finish_reason") in _CUT

    def _refusal(self, record: Record) -> str:
        """Why the message that is in the box again was not answered, if that still holds."""
        work = self.work
        if work is None or work.failure is None or isinstance(work.failure, Stopped):
            return ""
        own = work.request.text and record.draft in ("", work.request.text)
        return sentence_html(work.shown.error, wrong=True) if own else ""

    def _unanswered(self, record: Record) -> dict[str, Any]:
        """The value of the box for a message without an answer, with its files unless they were
        read; none while an answer may still come."""
        if self.under_way is not None:
            return {}
        work = self.work
        files = [each for each in work.request.files if Path(each).is_file()] if work else []
        refused = work.request.text if work and work.failure is not None else ""
        text = record.draft or refused
        return {"value": {"text": text, "files": files}} if text or files else {}
