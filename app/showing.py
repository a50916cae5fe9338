"""What the page is told of a conversation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from .engine.going import Going
from .engine.service import Service
from .keeping.record import Record, titles
from .layout import Parts
from .views.answer import answer_html, difference_html
from .views.history import History, history, start_of
from .views.status import sentence_html
from .visit import Visit

# How far what a page's event began has come: it is to be followed, or is to be shown as it ended.
BEGUN, ENDED = "begun", "ended"

# What the box offers.
_IDLE: dict[str, Any] = {"submit_btn": True, "stop_btn": False}
_BUSY: dict[str, Any] = {"submit_btn": False, "stop_btn": True}

# New values, by the component that shows them.
View = dict[Any, Any]


class Showing:
    """Views of conversations, over the page's parts."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self.service = service
        self.parts = parts

    def opened(self, visit: Visit, *, empty: bool = False, refill: bool = True) -> View:
        """The end of a conversation, and what is done for it."""
        record = self.service.record(visit.owner, visit.id)
        visit = replace(visit, start=start_of(record.said))
        if self.under_way(visit) is None:
            return self.idle(visit, empty=empty, refill=refill)
        around = self._about(visit, record, self.history(visit))
        return around | self.begun(visit, empty=empty)

    def idle(
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
        unanswered = self._unanswered(visit, record) if refill else {}
        parts = self.parts
        return (
            self._here(visit.id)
            | self.messages(shown)
            | self._about(visit, record, shown)
            | {
                parts.start: start,
                parts.stage: "",
                parts.status: status,
                parts.box: gr.MultimodalTextbox(**_IDLE | _emptied(empty) | unanswered),
            }
        )

    def begun(self, visit: Visit, *, empty: bool = False) -> View:
        """That something is being done for a conversation: the box offers to stop it, and nothing
        changes how much of it is shown."""
        parts, view = self.parts, self._here(visit.id)
        if not self.service.record(visit.owner, visit.id).said:  # it may be new to the list
            listed = titles(self.service.shelf(visit.owner).records(visit.query))
            view[parts.listing] = gr.Radio(choices=listed, value=visit.id, info="")
        return view | {
            parts.chat: self.history(visit).messages,
            parts.start: visit.start,
            parts.stage: BEGUN,
            parts.box: gr.MultimodalTextbox(**_BUSY | _emptied(empty)),
            parts.earlier: gr.Button(visible=False),
        }

    def unreadable(self, error: Exception) -> View:
        """Why nothing can be shown of a conversation."""
        return {
            self.parts.stage: "",
            self.parts.box: gr.MultimodalTextbox(**_IDLE),
            self.parts.status: sentence_html(str(error), wrong=True),
        }

    def messages(self, shown: History) -> View:
        """Messages, and that there are others before them."""
        said = f"Show {shown.before:,} earlier question{'s' * (shown.before > 1)}"
        return {
            self.parts.chat: shown.messages,
            self.parts.earlier: gr.Button(said, visible=shown.before > 0),
        }

    def history(self, visit: Visit) -> History:
        """What is shown of a conversation now, but for the answer that comes."""
        shelf = self.service.shelf(visit.owner)
        return history(self.service.shown(visit.owner, visit.id), shelf, visit.start)

    def under_way(self, visit: Visit) -> Going | None:
        """What is being done for a conversation, if anything is."""
        return self.service.under_way(visit.owner, visit.id)

    def difference(self, visit: Visit) -> str:
        """What a check of the last answer came to, if that is what was done last."""
        going = self.service.going(visit.owner, visit.id)
        if going is None or not (going.sent.check and going.ended):
            return ""
        shown, said = going.work.shown, self.service.record(visit.owner, visit.id).said
        if shown.error or shown.metrics is None or not said:
            return ""
        return difference_html(said[-1].text, shown.text, shown.metrics)

    def branch_at(self, visit: Visit) -> int | None:
        """The branch that a conversation is on, or goes to."""
        going = self.under_way(visit)
        if going is not None and going.sent.branch is not None:
            return going.sent.branch
        return self.service.record(visit.owner, visit.id).branch

    def _about(self, visit: Visit, record: Record, shown: History) -> View:
        """What stands around a conversation."""
        keys, parts = shown.answer_keys(), self.parts
        branches = [(each.title, number) for number, each in enumerate(record.branches, 1)]
        account = self.service.shelf(visit.owner).account(visit.id, keys[-1]) if keys else {}
        return {
            parts.branches: gr.Dropdown(
                choices=branches, value=record.branch, visible=len(branches) > 1
            ),
            parts.name: record.title if record.said or record.name else "",
            parts.chosen: record.questions,
            parts.answer: answer_html(account, self.service.loaded.calibration),
            parts.difference: self.difference(visit),
        }

    def _unanswered(self, visit: Visit, record: Record) -> dict[str, Any]:
        """A message that was sent and has no answer, for the box; its files too, unless they were
        read. Nothing while there may be one yet."""
        if self.under_way(visit) is not None:
            return {}
        going = self.service.going(visit.owner, visit.id)
        files = [each for each in going.sent.files if Path(each).is_file()] if going else []
        refused = going.sent.text if going and going.work.failure is not None else ""
        text = record.draft or refused
        return {"value": {"text": text, "files": files}} if text or files else {}

    def _here(self, id: str) -> View:
        """That a conversation is the one that is shown."""
        parts = self.parts
        return {parts.here: id, parts.kept_here: id, parts.listing: gr.Radio(value=id)}


def _emptied(empty: bool) -> dict[str, Any]:
    """What a box is told, if it is to be."""
    return {"value": None} if empty else {}
