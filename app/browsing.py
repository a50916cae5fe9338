"""What happens in the list of conversations."""

from typing import Any

import gradio as gr

from kvlite.errors import KvliteError

from .service import Service
from .talking import owner_of, titles


class Browsing:
    """The page's events about all conversations of a user."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def found(self, query: str, request: gr.Request) -> Any:
        """Those that match what is searched for."""
        return gr.Radio(choices=titles(self.service.shelf(owner_of(request)).records(query)))

    def rename(self, id: str, name: str, query: str, request: gr.Request) -> Any:
        """Call one otherwise."""
        shelf = self.service.shelf(owner_of(request))
        if not shelf.has(id):
            raise gr.Error("say something first: a new conversation has no name to change")
        try:
            shelf.rename(id, name)
        except KvliteError as error:
            raise gr.Error(str(error)) from None
        return self.found(query, request)

    def delete(self, id: str, sure: bool, request: gr.Request) -> str:
        """Remove one, if that is meant; what is shown then."""
        if not sure:
            return id
        self.service.forget(owner_of(request), id).wait()
        return ""

    def as_markdown(self, id: str, request: gr.Request) -> tuple[str, str]:
        """One as Markdown, and the name of a file for it."""
        return self._exported(id, request, "md")

    def as_json(self, id: str, request: gr.Request) -> tuple[str, str]:
        """One as JSON, and the name of a file for it."""
        return self._exported(id, request, "json")

    def _exported(self, id: str, request: gr.Request, suffix: str) -> tuple[str, str]:
        shelf = self.service.shelf(owner_of(request))
        if not shelf.has(id):
            raise gr.Error("there is nothing to export yet: say something first")
        record = shelf.record(id)
        text = record.markdown() if suffix == "md" else record.to_json()
        name = "".join(each if each.isalnum() or each in " -_" else "_" for each in record.title)
        return text, f"{name.strip() or 'conversation'}.{suffix}"
