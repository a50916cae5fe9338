"""What happens in the list of conversations."""

import json
from time import time
from typing import Any

import gradio as gr

from kvlite.conversation.export import as_json, as_markdown
from kvlite.errors import SettingError

from .engine.service import Service
from .tabs import owner_of
from .views.listing import listing_html


def listing_of(service: Service, owner: str, query: str) -> str:
    """A user's conversations that match a query, as the list shows them: when that was so, the
    query, and HTML, as the page's script takes them."""
    store, now = service.store(owner), time()
    html = listing_html(store.records(query), service.busy(owner), store.deleted(), query)
    return json.dumps([now, query, html])


class SidebarEvents:
    """The page's events about all conversations of a user."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def found(self, query: str, request: gr.Request) -> str:
        """List the conversations that match a query, or say that there are none."""
        return listing_of(self.service, owner_of(request), query)

    def busy(self, request: gr.Request) -> str:
        """What changes when the list has to, whatever any page does."""
        owner = owner_of(request)
        store = self.service.store(owner)
        deleted, changed = store.deleted(), store.changed()
        return " ".join([*self.service.busy(owner), deleted.id if deleted else "", changed])

    def rename(
        self, id: str, name: str, query: str, here: str, request: gr.Request
    ) -> tuple[str, Any]:
        """Name a conversation: the list, and the name of the one that is shown (`here`)."""
        owner = owner_of(request)
        self.service.rename(owner, id, name)
        shown = self.service.record(owner, id).title if id == here else gr.skip()
        return self.found(query, request), shown

    def as_markdown(self, id: str, request: gr.Request) -> tuple[str, str]:
        """A conversation as Markdown, and the name of a file for it."""
        return self._exported(id, request, "md")

    def as_json(self, id: str, request: gr.Request) -> tuple[str, str]:
        """A conversation as JSON, and the name of a file for it."""
        return self._exported(id, request, "json")

    def _exported(self, id: str, request: gr.Request, suffix: str) -> tuple[str, str]:
        owner = owner_of(request)
        store = self.service.store(owner)
        if not store.has(id):
            raise SettingError("there is nothing to export yet: say something first")
        record = self.service.record(owner, id)
        text = as_markdown(record, store) if suffix == "md" else as_json(record, store)
        name = "".join(each if each.isalnum() or each in " -_" else "_" for each in record.title)
        return text, f"{name.strip() or 'conversation'}.{suffix}"
