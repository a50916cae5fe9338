"""What a client sends, as it comes."""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

# Seconds in which some more of it must come.
PATIENCE = 60.0


async def parts_of(scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
    """What is sent, as it comes.

    Raises:
        ClientDisconnect: whoever sends it has gone, or sends no more.
    """
    parts = Request(scope, receive).stream()
    while True:
        try:
            yield await asyncio.wait_for(anext(parts), PATIENCE)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ClientDisconnect from None
