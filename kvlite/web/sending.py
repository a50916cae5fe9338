"""What a client sends, as it comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

# Seconds in which some more of it must come.
PATIENCE = 60.0
# Bytes of one body, and of all that are held at once.
LONGEST, TOGETHER = 32 << 20, 128 << 20
# Lists, mappings and commas in one: each becomes an object many times its size.
_PARTS = 2_000_000


async def parts_of(scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
    """What is sent, as it comes. Raises ClientDisconnect if whoever sends it has gone, or sends no
    more."""
    parts = Request(scope, receive).stream()
    while True:
        try:
            yield await asyncio.wait_for(anext(parts), PATIENCE)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ClientDisconnect from None


class TooMuch(Exception):
    """A body is too long (`status` 413), or there is no room for it beside others (503)."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Bodies:
    """Reads what is sent, and never more than there is room for."""

    def __init__(self) -> None:
        self._held = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """All that is sent, which counts until the block ends. Raises TooMuch if there is no room
        for it, and ClientDisconnect as `parts_of`."""
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > LONGEST):
            raise TooMuch(413)
        body = bytearray()
        try:
            async for part in parts_of(scope, receive):
                body += part
                self._held += len(part)
                if len(body) > LONGEST:
                    raise TooMuch(413)
                if self._held > TOGETHER:
                    raise TooMuch(503)
            if sum(map(body.count, (b"[", b"{", b","))) > _PARTS:
                raise TooMuch(413)
            yield bytes(body)
        finally:
            self._held -= len(body)
