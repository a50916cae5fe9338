"""What the page is told of a conversation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from .engine.job import Job
from .engine.service import Service
from .layout import Parts
from .request_context import RequestContext
from .storage.record import Record, titles
from .views.answer import answer_html, difference_html
from .views.history import History, history, start_of
from .views.status import sentence_html

# How far what a page's event began has come: it is to be followed, or is to be shown as it ended.
BEGUN, ENDED = "begun", "ended"

# What the box offers.
_IDLE: dict[str, Any] = {"submit_btn": True, "stop_btn": False}
_BUSY: dict[str, Any] = {"submit_btn": False, "stop_btn": True}

# New values, by the component that shows them.
Updates = dict[Any, Any]


class ConversationView:
    """Views of conversations, over the page's parts."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts

    def opened(
        self, context: RequestContext, *, empty: bool = False, refill: bool = True
    ) -> Updates:
        """The end of a conversation, and what is done for it."""
        record = self.service.record(context.owner, context.id)
        context = replace(context, start=start_of(record.said))
        if self.under_way(context) is None:
            return self.idle(context, empty=empty, refill=refill)
        around = self._about(context, record, self.history(context))
        return around | self.begun(context, empty=empty)

    def idle(
        self, context: RequestContext, *, status: str = "", refill: bool = True, empty: bool = False
    ) -> Updates:
        """All that is shown of a conversation while nothing is done for it.

        Args:
            refill: whether a message that was not answered comes into the box.
            empty: whether what is there goes otherwise.
        """
        store = self.service.store(context.owner)
        record = self.service.record(context.owner, context.id)
        start = start_of(record.said, context.start)
        shown = history(replace(record, draft=""), store, start)
        unanswered = self._unanswered(context, record) if refill else {}
        parts = self.parts
        return (
            self._here(context.id)
            | self.messages(shown)
            | self._about(context, record, shown)
            | {
                parts.start: start,
                parts.stage: "",
                parts.status: status,
                parts.box: gr.MultimodalTextbox(**_IDLE | _emptied(empty) | unanswered),
            }
        )

    def begun(self, context: RequestContext, *, empty: bool = False) -> Updates:
        """That something is being done for a conversation: the box offers to stop it, and nothing
        changes how much of it is shown."""
        parts, updates = self.parts, self._here(context.id)
        if not self.service.record(context.owner, context.id).said:  # it may be new to the list
            listed = titles(self.service.store(context.owner).records(context.query))
            updates[parts.listing] = gr.Radio(choices=listed, value=context.id, info="")
        return updates | {
            parts.chat: self.history(context).messages,
            parts.start: context.start,
            parts.stage: BEGUN,
            parts.box: gr.MultimodalTextbox(**_BUSY | _emptied(empty)),
            parts.earlier: gr.Button(visible=False),
        }

    def unreadable(self, error: Exception) -> Updates:
        """Why nothing can be shown of a conversation."""
        return {
            self.parts.stage: "",
            self.parts.box: gr.MultimodalTextbox(**_IDLE),
            self.parts.status: sentence_html(str(error), wrong=True),
        }

    def messages(self, shown: History) -> Updates:
        """Messages, and that there are others before them."""
        said = f"Show {shown.before:,} earlier question{'s' * (shown.before > 1)}"
        return {
            self.parts.chat: shown.messages,
            self.parts.earlier: gr.Button(said, visible=shown.before > 0),
        }

    def history(self, context: RequestContext) -> History:
        """What is shown of a conversation now, but for the answer that comes."""
        store = self.service.store(context.owner)
        return history(self.service.shown(context.owner, context.id), store, context.start)

    def under_way(self, context: RequestContext) -> Job | None:
        """What is being done for a conversation, if anything is."""
        return self.service.under_way(context.owner, context.id)

    def difference(self, context: RequestContext) -> str:
        """What a check of the last answer came to, if that is what was done last."""
        job = self.service.job(context.owner, context.id)
        if job is None or not (job.sent.check and job.ended):
            return ""
        shown, said = job.work.shown, self.service.record(context.owner, context.id).said
        if shown.error or shown.metrics is None or not said:
            return ""
        return difference_html(said[-1].text, shown.text, shown.metrics)

    def branch_at(self, context: RequestContext) -> int | None:
        """The branch that a conversation is on, or goes to."""
        job = self.under_way(context)
        if job is not None and job.sent.branch is not None:
            return job.sent.branch
        return self.service.record(context.owner, context.id).branch

    def _about(self, context: RequestContext, record: Record, shown: History) -> Updates:
        """What stands around a conversation."""
        keys, parts = shown.answer_keys(), self.parts
        branches = [(each.title, number) for number, each in enumerate(record.branches, 1)]
        account = self.service.store(context.owner).account(context.id, keys[-1]) if keys else {}
        return {
            parts.branches: gr.Dropdown(
                choices=branches, value=record.branch, visible=len(branches) > 1
            ),
            parts.name: record.title if record.said or record.name else "",
            parts.chosen: record.questions,
            parts.answer: answer_html(account, self.service.model_host.calibration),
            parts.difference: self.difference(context),
        }

    def _unanswered(self, context: RequestContext, record: Record) -> dict[str, Any]:
        """A message that was sent and has no answer, for the box; its files too, unless they were
        read. Nothing while there may be one yet."""
        if self.under_way(context) is not None:
            return {}
        job = self.service.job(context.owner, context.id)
        files = [each for each in job.sent.files if Path(each).is_file()] if job else []
        refused = job.sent.text if job and job.work.failure is not None else ""
        text = record.draft or refused
        return {"value": {"text": text, "files": files}} if text or files else {}

    def _here(self, id: str) -> Updates:
        """That a conversation is the one that is shown."""
        parts = self.parts
        return {parts.here: id, parts.kept_here: id, parts.listing: gr.Radio(value=id)}


def _emptied(empty: bool) -> dict[str, Any]:
    """What a box is told, if it is to be."""
    return {"value": None} if empty else {}
