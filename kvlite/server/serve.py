"""Serves a model on this machine."""

import logging
import socket
from collections.abc import Callable

import uvicorn

from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.server.config import ServerConfig
from kvlite.server.routes import make_app
from kvlite.server.served_model import ServedModel

# Seconds that answers have to end when the server does.
_PATIENCE = 2
# Connections that wait to be taken.
_BACKLOG = 128


def serve(settings: Settings, config: ServerConfig, *, tell: Callable[[str], None] = print) -> None:
    """Serve until someone interrupts. The address is given to `tell`.

    Raises:
        SettingError: others could come in without a key, or the address is taken.
    """
    config.require_key()
    listening = _listening(config.host, config.port)
    _log_to_stderr()
    with listening:
        model = ServedModel(settings, config)
        host = f"[{config.host}]" if ":" in config.host else config.host
        tell(f"kvlite serves {model.names[0]} at http://{host}:{config.port}/v1 (Ctrl-C ends it)")
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(model, config),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_PATIENCE,
                h11_max_incomplete_event_size=64 << 10,
                lifespan="on",
            )
        )
        server.run(sockets=[listening])


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
