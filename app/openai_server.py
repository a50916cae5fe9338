"""OpenAI's API beside the page: programs use the model that the page has."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig, names_of
from kvlite.server.models import Models
from kvlite.server.serve import HttpServer, listen
from kvlite.server.served_model import ServedModel
from kvlite.server.state import ServerState
from kvlite.web.engine_thread import Engine
from kvlite.web.work import Task, Work

from .engine.service import Service

# Seconds that open requests have to end.
_PATIENCE = 10.0


class LentModel(Models):
    """The page's model. Its own methods are called by the engine's thread."""

    def __init__(
        self,
        settings: Settings,
        config: ServerConfig,
        engine: Engine,
        loading: Work,
        make_way: Task,
    ) -> None:
        """Which `loading` loads; `make_way` frees what the page's conversation takes."""
        own = replace(config, one_model=True, unload_after=0)
        super().__init__(settings, ServerState(own, engine, make_way))
        self.current.loading = loading

    def expect(self, settings: Settings, loading: Work) -> None:
        """Let the model go, as the page loads another one."""
        self.current.release()
        self.first = self.current = ServedModel(names_of(settings.model), settings, self.state)
        self.current.loading = loading

    def make_room(self, nbytes: int) -> None:
        """Have so much of the device free for the page's conversation, if programs can go."""
        if self.current.conversations is not None:
            self.current.conversations.have(nbytes)

    def close(self) -> None:
        """The app ends the engine, and keeps what was read."""


class OpenAIServer:
    """A server at an `address`, whose model the page loads, in the same process."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises SettingError if others could come in without a key, or the port is taken."""
        config.require_key()
        self.address = config.address
        self._config, self._socket = config, listen(config, "--api-port")

    @contextmanager
    def answering(self, service: Service, loading: Work) -> Iterator[None]:
        """Answer programs meanwhile, once the model is there."""
        host = service.model_host
        lent = LentModel(host.settings, self._config, service.engine, loading, host.set_aside)
        service.engine.submit(lambda work: host.lend(lent), "")
        server = HttpServer(lent)
        given = {"sockets": [self._socket]}
        thread = threading.Thread(target=server.run, kwargs=given, name="kvlite api", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(_PATIENCE)
            self._socket.close()
