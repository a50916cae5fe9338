"""What the page shows of a conversation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from .engine.service import Service
from .engine.work import Work
from .layout import Parts
from .request_context import RequestContext
from .storage.record import Record, titles
from .views.answer import answer_html, difference_html
from .views.history import History, history, start_of
from .views.status import sentence_html

# The stage of what an event began: it is to be followed, or to be shown as it ended.
BEGUN, ENDED = "begun", "ended"

# What the box offers.
_IDLE: dict[str, Any] = {"submit_btn": True, "stop_btn": False}
_BUSY: dict[str, Any] = {"submit_btn": False, "stop_btn": True}
_EMPTY: dict[str, Any] = {"value": None}

# New values, by the component that shows them.
Updates = dict[Any, Any]


class ConversationView:
    """Views of conversations, as updates of the page's parts."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts

    def opened(
        self, context: RequestContext, *, empty: bool = False, refill: bool = True
    ) -> Updates:
        """The end of a conversation, and what is done for it; arguments are those of `idle`."""
        record = self.service.record(context.owner, context.id)
        context = replace(context, start=start_of(record.said))
        if self.under_way(context) is None:
            return self.idle(context, empty=empty, refill=refill)
        around = self._around(context, record, self.history(context))
        return around | self.begun(context, empty=empty)

    def idle(
        self, context: RequestContext, *, status: str = "", refill: bool = True, empty: bool = False
    ) -> Updates:
        """All of a conversation while nothing is done for it. With `refill` a message without an
        answer is put into the box; with `empty` it is emptied otherwise."""
        store = self.service.store(context.owner)
        record = self.service.record(context.owner, context.id)
        start = start_of(record.said, context.start)
        shown = history(replace(record, draft=""), store, start)
        box = _IDLE | (_EMPTY if empty else {})
        if refill:
            box |= self._unanswered(context, record)
        return (
            self._here(context.id)
            | self.messages(shown)
            | self._around(context, record, shown)
            | {
                self.parts.start: start,
                self.parts.stage: "",
                self.parts.status: status,
                self.parts.box: gr.MultimodalTextbox(**box),
            }
        )

    def begun(self, context: RequestContext, *, empty: bool = False) -> Updates:
        """A conversation for which something is being done: the box offers to stop it, and nothing
        changes how many messages are shown."""
        parts, updates = self.parts, self._here(context.id)
        if not self.service.record(context.owner, context.id).said:  # it may be new to the list
            listed = titles(self.service.store(context.owner).records(context.query))
            updates[parts.listing] = gr.Radio(choices=listed, value=context.id, info="")
        return updates | {
            parts.chat: self.history(context).messages,
            parts.start: context.start,
            parts.stage: BEGUN,
            parts.box: gr.MultimodalTextbox(**_BUSY | (_EMPTY if empty else {})),
            parts.earlier: gr.Button(visible=False),
        }

    def unreadable(self, error: Exception) -> Updates:
        """Why a conversation cannot be shown."""
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

    def history(self, context: RequestContext) -> History:
        """The messages shown now, without the answer that is coming."""
        store = self.service.store(context.owner)
        return history(self.service.shown(context.owner, context.id), store, context.start)

    def under_way(self, context: RequestContext) -> Work | None:
        """What is being done for a conversation."""
        return self.service.under_way(context.owner, context.id)

    def account(self, context: RequestContext, key: str | None) -> tuple[dict[str, Any], str]:
        """The account of an answer, empty where there is none; and as HTML."""
        store = self.service.store(context.owner)
        account = store.account(context.id, key) if key else {}
        return account, answer_html(account, self.service.model_host.calibration)

    def difference(self, context: RequestContext) -> str:
        """The result of a check of the last answer, if that is what was done last."""
        work = self.service.work_for(context.owner, context.id)
        if work is None or not (work.request.check and work.shown.ended):
            return ""
        shown, said = work.shown, self.service.record(context.owner, context.id).said
        if shown.error or shown.metrics is None or not said:
            return ""
        return difference_html(said[-1].text, shown.text, shown.metrics)

    def branch_at(self, context: RequestContext) -> int | None:
        """The branch that a conversation is on, or goes to."""
        work = self.under_way(context)
        if work is not None and work.request.branch is not None:
            return work.request.branch
        return self.service.record(context.owner, context.id).branch

    def _around(self, context: RequestContext, record: Record, shown: History) -> Updates:
        keys, parts = shown.answer_keys(), self.parts
        branches = [(each.title, number) for number, each in enumerate(record.branches, 1)]
        return {
            parts.branches: gr.Dropdown(
                choices=branches, value=record.branch, visible=len(branches) > 1
            ),
            parts.name: record.title if record.said or record.name else "",
            parts.chosen: record.questions,
            parts.answer: self.account(context, keys[-1] if keys else None)[1],
            parts.difference: self.difference(context),
        }

    def _unanswered(self, context: RequestContext, record: Record) -> dict[str, Any]:
        """The value of the box for a message without an answer, with its files unless they were
        read; none while an answer may still come."""
        if self.under_way(context) is not None:
            return {}
        work = self.service.work_for(context.owner, context.id)
        files = [each for each in work.request.files if Path(each).is_file()] if work else []
        refused = work.request.text if work and work.failure is not None else ""
        text = record.draft or refused
        return {"value": {"text": text, "files": files}} if text or files else {}

    def _here(self, id: str) -> Updates:
        parts = self.parts
        return {parts.here: id, parts.kept_here: id, parts.listing: gr.Radio(value=id)}
