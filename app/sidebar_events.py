"""What happens in the list of conversations."""

from typing import Any

import gradio as gr

from kvlite.errors import SettingError

from .engine.service import Service
from .storage.record import titles
from .tabs import owner_of
from .views.markdown import sanitized


class SidebarEvents:
    """The page's events about all conversations of a user."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def found(self, query: str, request: gr.Request) -> Any:
        """List the conversations that match a query, or say that there are none."""
        records = self.service.store(owner_of(request)).records(query)
        asked = " ".join(query.split())
        none = f"No conversation has “{sanitized(asked)}”." if asked and not records else ""
        return gr.Radio(choices=titles(records), info=none)

    def rename(self, id: str, name: str, query: str, request: gr.Request) -> Any:
        """Name a conversation."""
        owner = owner_of(request)
        if not self.service.store(owner).has(id):
            raise SettingError("say something first: a new conversation has no name to change")
        self.service.rename(owner, id, name)
        return self.found(query, request)

    def as_markdown(self, id: str, request: gr.Request) -> tuple[str, str]:
        """A conversation as Markdown, and the name of a file for it."""
        return self._exported(id, request, "md")

    def as_json(self, id: str, request: gr.Request) -> tuple[str, str]:
        """A conversation as JSON, and the name of a file for it."""
        return self._exported(id, request, "json")

    def _exported(self, id: str, request: gr.Request, suffix: str) -> tuple[str, str]:
        owner = owner_of(request)
        if not self.service.store(owner).has(id):
            raise SettingError("there is nothing to export yet: say something first")
        record = self.service.record(owner, id)
        text = record.markdown() if suffix == "md" else record.to_json()
        name = "".join(each if each.isalnum() or each in " -_" else "_" for each in record.title)
        return text, f"{name.strip() or 'conversation'}.{suffix}"
