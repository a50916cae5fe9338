"""OpenAI's API beside the page: programs use the model that the page has."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvlite.server.config import ServerConfig
from kvlite.server.http_server import HttpServer, listen
from kvlite.server.lent_model import LentModel
from kvlite.web.work import Work

from .engine.service import Service

# Seconds that open requests have to end.
_PATIENCE = 10.0


class OpenAIServer:
    """A server whose model the page loads, in the same process.

    Attributes:
        address: where OpenAI's clients find it.
    """

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
