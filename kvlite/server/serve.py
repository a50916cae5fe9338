"""Serves the models of this machine."""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from kvlite.config.settings import Settings
from kvlite.errors import SettingError, Stopped
from kvlite.server.config import ServerConfig
from kvlite.server.http_server import HttpServer
from kvlite.server.models import Models

# Connections that wait to be taken.
_BACKLOG = 128


def serve(settings: Settings, config: ServerConfig, *, tell: Callable[[str], None] = print) -> None:
    """Serve until someone interrupts. The address, and that the model is loaded, go to `tell`.

    Raises:
        SettingError: others could come in without a key, or the address is taken.
        KvliteError: the model cannot be loaded.
    """
    config.require_key()
    listening = _listening(config.host, config.port)
    _log_to_stderr()
    with listening:
        models = Models(settings, config)
        model, loading = models.first, models.first.load()
        host = f"[{config.host}]" if ":" in config.host else config.host
        tell(f"kvlite serves {model.names[0]} at http://{host}:{config.port}/v1 (Ctrl-C ends it)")
        server = HttpServer(models)

        def loaded() -> None:
            loading.ended.wait()
            if loading.shown.error:
                server.should_exit = True
            else:
                tell(f"{model.names[0]} is loaded")

        threading.Thread(target=loaded, name="kvlite loading", daemon=True).start()
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
        failure = loading.failure
        if failure is not None and not isinstance(failure, Stopped):
            raise failure


def _listening(host: str, port: int) -> socket.socket:
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
            f"--host {host} --port {port} cannot be served on ({said}): give another --port, or "
            "end what has it"
        ) from None
    return listening


def _log_to_stderr() -> None:
    log = logging.getLogger("kvlite.server")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
