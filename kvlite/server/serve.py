"""Serves the models of this machine by uvicorn, which ends what is open before it waits."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from kvlite.config.settings import Settings
from kvlite.errors import SettingError, Stopped
from kvlite.memory.free import share_heap
from kvlite.server.config import ServerConfig
from kvlite.server.models import Models
from kvlite.server.routes import make_app
from kvlite.server.state import ServerState

# Seconds in which clients must take the last of what they are sent, and then uvicorn's own.
_PATIENCE, _UVICORNS = 1, 3
# Connections that wait to be taken.
_BACKLOG = 128


def listen(config: ServerConfig, flag: str = "--port") -> socket.socket:
    """A socket at the server's address, whose port `flag` sets. Raises SettingError if it is taken,
    or of another machine."""
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        said = error.strerror or error
        raise SettingError(
            f"--host {host} {flag} {port} cannot be served on ({said}): give another {flag}, or "
            "end what has it"
        ) from None
    return listening


class HttpServer(uvicorn.Server):
    """Answers programs. When it ends, so do open requests: clients are told, and the model stops
    within a token or a chunk."""

    def __init__(self, models: Models) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(models),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_UVICORNS,
                h11_max_incomplete_event_size=64 << 10,
                lifespan="on",
            )
        )
        self._state = models.state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all that is open, then close as uvicorn does."""
        self._state.end_requests()
        hanging_up = asyncio.get_running_loop().call_later(_PATIENCE, self._hang_up)
        try:
            await super().shutdown(sockets)
        finally:
            hanging_up.cancel()

    def _hang_up(self) -> None:
        """Leave clients that do not read."""
        for connection in self.server_state.connections:
            if connection.transport is not None:
                connection.transport.abort()


def serve(settings: Settings, config: ServerConfig, *, tell: Callable[[str], None] = print) -> None:
    """Serve until someone interrupts. The address goes to `tell`, before and after loading.
    Raises SettingError if others could come in without a key, or the address is taken, and
    KvliteError if the model cannot be loaded."""
    config.require_key()
    share_heap()
    listening = listen(config)
    _log_to_stderr()
    with listening:
        models = Models(settings, ServerState(config))
        model, loading = models.first, models.first.load()
        tell(f"Loading {model.names[0]} for {config.address} (Ctrl-C ends it)")
        server = HttpServer(models)

        def loaded() -> None:
            loading.ended.wait()
            if loading.shown.error:
                server.should_exit = True
            else:
                tell(f"kvlite serves {model.names[0]} at {config.address}")

        threading.Thread(target=loaded, name="kvlite loading", daemon=True).start()
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
        failure = loading.failure
        if failure is not None and not isinstance(failure, Stopped):
            raise failure


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name in ("kvlite.server", "kvlite.templates"):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(logging.INFO)
