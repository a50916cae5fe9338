"""What all models of a server share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import TypeVar

from kvlite.config.paths import data_folder
from kvlite.conversation.convert import open_library
from kvlite.model.grammar_trial import GIVEN_UP
from kvlite.server.config import ServerConfig
from kvlite.server.counters import Counters
from kvlite.server.files import Files
from kvlite.server.refusals import Refusal
from kvlite.web.engine_thread import Engine
from kvlite.web.work import Work

_T = TypeVar("_T")


class ServerState:
    """The engine's thread, uploads, what is counted, and the end.

    Attributes:
        library: where conversations on disk are.
        make_way: called by the engine's thread before an answer for which the device has no room;
            None if nobody else has a conversation there.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine | None = None,
        make_way: Callable[[Work], None] | None = None,
    ) -> None:
        """With a thread of its own, or the `engine` of the program that it is part of."""
        root = config.folder or data_folder()
        self.config, self.counters = config, Counters()
        self.engine, self.make_way = engine or Engine(), make_way
        self.files, self.library = Files(root / "server" / "files"), open_library(root=root)
        self._ending = False
        self._trials = ThreadPoolExecutor(config.requests, "kvlite trial")
        self._at_end = set[Callable[[], None]]()

    @asynccontextmanager
    async def until_end(self) -> AsyncIterator[None]:
        """What is awaited within is given up when the server ends. Raises Refusal if it does."""
        self.require_up()
        try:
            async with asyncio.timeout(None) as wait:
                with self.at_end(partial(wait.reschedule, 0)):
                    yield
        except TimeoutError:
            if wait.expired():
                self.require_up()
            raise

    async def waited_for(self, work: Callable[[], _T]) -> _T:
        """What is made, in a thread, of what may have to be tried (`model.grammar_trial`); given up
        with whoever waits for it."""
        gone, context = Event(), copy_context()
        context.run(GIVEN_UP.set, gone)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._trials, context.run, work)
        finally:
            gone.set()

    @contextmanager
    def at_end(self, act: Callable[[], None]) -> Iterator[None]:
        """Have something done within when the server ends, in the loop that answers requests."""
        self._at_end.add(act)
        try:
            yield
        finally:
            self._at_end.remove(act)

    def require_up(self) -> None:
        """Raises Refusal if the server ends."""
        if self._ending:
            said = "the server ends: send this again once it is back"
            raise Refusal(said, 503, code="server_ends") from None

    def end_requests(self) -> None:
        """Give up all requests, and all that come; called in the loop that answers them."""
        self._ending = True
        for act in [*self._at_end]:
            act()
