"""Who looks at what."""

from dataclasses import dataclass

import gradio as gr


@dataclass(frozen=True)
class RequestContext:
    """Someone looks at a conversation.

    Attributes:
        owner: whose it is.
        id: which.
        tab: of the browser.
        start: how many of its messages are left out there, the first ones.
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
    """Who asks, about which conversation, and what of it they are shown."""
    return RequestContext(owner_of(request), id, tab_of(request), start, query)


def owner_of(request: gr.Request) -> str:
    """Who is logged in, "" where nobody has to be."""
    return request.username or ""


def tab_of(request: gr.Request) -> str:
    """Which tab asks."""
    return request.session_hash or ""
