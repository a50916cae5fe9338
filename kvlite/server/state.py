"""What all models of a server share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvlite.config.paths import data_folder
from kvlite.server.config import ServerConfig
from kvlite.server.counters import Counters
from kvlite.server.files import Files
from kvlite.server.refusals import Refusal
from kvlite.web.engine_thread import Engine
from kvlite.web.work import Work


class ServerState:
    """The engine's thread, uploads, what is counted, and the end.

    Attributes:
        folder: where conversations on disk are.
        make_way: called by the engine's thread before an answer, where the device has room for one
            conversation alone; None if nobody else has one.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine | None = None,
        make_way: Callable[[Work], None] | None = None,
    ) -> None:
        """With a thread of its own, or the `engine` of the program that it is part of."""
        folder = config.folder or data_folder() / "server"
        self.config, self.counters = config, Counters()
        self.engine, self.make_way = engine or Engine(), make_way
        self.files, self.folder = Files(folder / "files"), folder / str(config.port)
        self._ending = False
        self._waits = set[asyncio.Timeout]()

    @asynccontextmanager
    async def until_end(self) -> AsyncIterator[None]:
        """What is awaited within is given up when the server ends.

        Raises:
            Refusal: it does.
        """
        ends = Refusal("the server ends: send this again once it is back", 503, code="server_ends")
        if self._ending:
            raise ends
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.remove(wait)
        except TimeoutError:
            if self._ending and wait.expired():
                raise ends from None
            raise

    def end_requests(self) -> None:
        """Give up all requests, and all that come; called in the loop that answers them."""
        self._ending = True
        for wait in self._waits:
            wait.reschedule(0)
