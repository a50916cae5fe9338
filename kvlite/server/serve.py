"""Serves the models of this machine."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from kvlite.config.settings import Settings
from kvlite.errors import Stopped
from kvlite.server.config import ServerConfig
from kvlite.server.http_server import HttpServer, listen
from kvlite.server.models import Models
from kvlite.server.state import ServerState


def serve(settings: Settings, config: ServerConfig, *, tell: Callable[[str], None] = print) -> None:
    """Serve until someone interrupts. The address, and that the model is loaded, go to `tell`.

    Raises:
        SettingError: others could come in without a key, or the address is taken.
        KvliteError: the model cannot be loaded.
    """
    config.require_key()
    listening = listen(config)
    _log_to_stderr()
    with listening:
        models = Models(settings, ServerState(config))
        model, loading = models.first, models.first.load()
        tell(f"kvlite serves {model.names[0]} at {config.address} (Ctrl-C ends it)")
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


def _log_to_stderr() -> None:
    log = logging.getLogger("kvlite.server")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
