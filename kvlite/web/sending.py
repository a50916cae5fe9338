"""What a client sends, as it comes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

# In so many seconds at least so many bytes must come, or the end.
PATIENCE, LEAST = 20.0, 32 << 10
# Bytes of one body, and of all that are held at once.
LONGEST, TOGETHER = 32 << 20, 128 << 20
# Lists, mappings and commas in one: each becomes an object many times its size.
_PARTS = 2_000_000
# Bytes of a body that is looked through at once; of longer ones in a thread, so many at a time, as
# Python's lock goes from one thread to the next every 5 ms.
_SHORT, _THREADS = 64 << 10, 2
_T = TypeVar("_T")


class TooSlow(ClientDisconnect):
    """What is sent does not come."""


async def parts_of(scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
    """What is sent, as it comes. Raises ClientDisconnect if whoever sends it has gone, and TooSlow
    if it comes too slowly, however little at a time."""
    parts, now = Request(scope, receive).stream(), asyncio.get_running_loop().time
    came, until = 0, now() + PATIENCE
    while True:
        try:
            async with asyncio.timeout_at(until):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TooSlow from None
        yield part
        came += len(part)
        if came >= LEAST:
            came, until = 0, now() + PATIENCE


class TooMuch(Exception):
    """A body is too long (`status` 413), or there is no room for it beside others (503)."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Bodies:
    """Reads what is sent, and never more than there is room for."""

    def __init__(self) -> None:
        self._held = 0
        self._looking = asyncio.Semaphore(_THREADS)

    async def look(self, body: bytes, through: Callable[[bytes], _T]) -> _T:
        """What a function makes of a body, beside everything else."""
        if len(body) <= _SHORT:
            return through(body)
        async with self._looking:
            return await asyncio.to_thread(through, body)

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
            whole = bytes(body)
            if await self.look(whole, _parts) > _PARTS:
                raise TooMuch(413)
            yield whole
        finally:
            self._held -= len(body)


def _parts(body: bytes) -> int:
    return sum(map(body.count, (b"[", b"{", b",")))
