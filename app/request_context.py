"""Who asks, and about which conversation."""

from dataclasses import dataclass

import gradio as gr


@dataclass(frozen=True)
class RequestContext:
    """A user looks at a conversation.

    Attributes:
        tab: of the browser, by its session's hash.
        start: how many of the conversation's first messages are not shown there.
        query: what conversations are searched for there.
    """

    owner: str
    id: str
    tab: str
    start: int = 0
    query: str = ""


def request_context(
    request: gr.Request, id: str, start: int = 0, query: str = ""
) -> RequestContext:
    """The context of a request."""
    return RequestContext(owner_of(request), id, request.session_hash or "", start, query)


def owner_of(request: gr.Request) -> str:
    """The user's name, "" where nobody has to log in."""
    return request.username or ""
