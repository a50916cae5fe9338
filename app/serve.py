"""Serves the app on this machine."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from kvlite.config.paths import data_folder
from kvlite.config.settings import Settings
from kvlite.errors import SettingError

from .web.guard import ServerConfig

_STYLE = Path(__file__).parent / "web" / "style.css"
# Read when gradio is imported, or when it starts: nothing is told to anyone, nor made into
# statistics for nobody after every event.
_QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_ANALYTICS_CACHE_FREQUENCY": "1000000000",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


def serve(
    settings: Settings,
    server_config: ServerConfig,
    *,
    root: Path | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve until someone interrupts, then keep the conversation in memory and end.

    Args:
        server_config: how it is reached.
        root: kvlite's data folder, if not the usual one.
        tell: told the address, why the model cannot be loaded if it cannot, and in the end what
            became of the conversations.

    Raises:
        SettingError: others could come in without a password, no port is free, or another app has
            the same conversations open.
    """
    server_config.require_password()
    os.environ.update(_QUIET)
    # Read when torch is imported. Its threads would spin while they wait for one another, which
    # takes ten times as long as soon as anything else, as a document's reader, wants a core too.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in ("NO_PROXY", "no_proxy"):  # gradio asks itself whether it is there
        others = os.environ.get(name, "")
        os.environ[name] = ",".join(
            filter(None, [others, "localhost", "127.0.0.1", server_config.host])
        )
    with _alone(root or data_folder()):
        _serve(settings, server_config, root, tell)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Raises SettingError if another app has the conversations of this data folder open."""
    folder = root / "app"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".open", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise SettingError(
            f"another `kvlite app` has the conversations in {folder} open: use that one, end it, "
            "or set KVLITE_DATA to another folder"
        ) from None
    except OSError as error:
        raise SettingError(
            f"{folder} cannot be locked ({error.strerror or error}), so that two apps could write "
            "to it at once: set KVLITE_DATA to a folder on a disk of this machine"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _serve(
    settings: Settings, server_config: ServerConfig, root: Path | None, tell: Callable[[str], None]
) -> None:
    from .engine.service import Service

    service = Service(settings, root)
    # Nobody else has it: what is there is of an app that was killed.
    service.uploads.clear()
    os.environ["GRADIO_TEMP_DIR"] = str(service.uploads.folder)

    from starlette.middleware import Middleware

    from kvlite.model.source import models_here

    from .engine.live import Live
    from .estimate import Estimator
    from .form import Models
    from .page import make_page
    from .web.gradio_patches import ScriptInjector, poll_queue_slowly
    from .web.uploading import LARGEST, Uploading

    host, models = server_config.host, Models(models_here(), others=not server_config.auth)
    page = make_page(
        service, Live(service.model_host), Estimator(service.model_host.held_bytes), models
    )
    page.queue(max_size=64, default_concurrency_limit=8)
    poll_queue_slowly(page)
    over = threading.Event()
    with _interrupts(over):
        try:
            _, local, shared = page.launch(
                server_name=f"[{host}]" if ":" in host else host,
                server_port=_free_port(host, server_config.port),
                auth=list(server_config.auth) or None,
                share=server_config.share,
                inbrowser=server_config.browser,
                prevent_thread_lock=True,
                quiet=True,
                show_error=True,
                max_file_size=LARGEST,
                allowed_paths=[],
                enable_monitoring=False,
                run_history=False,
                ssr_mode=False,
                _frontend=False,  # or what takes 3 seconds to answer first is given up
                pwa=False,
                mcp_server=False,
                footer_links=[],
                app_kwargs={
                    "middleware": [
                        *server_config.middleware(),
                        Middleware(Uploading, uploads=service.uploads),
                        Middleware(ScriptInjector),
                    ]
                },
                theme=_theme(),
                # Given as css, gradio would rewrite its selectors, and break some.
                head=f"<style>{_STYLE.read_text()}</style>",
            )
        except OSError as error:
            raise SettingError(f"--host {host} --port {server_config.port}: {error}") from None
        model = service.load(settings)
        tell(f"kvlite is at {shared or local} (Ctrl-C ends it)")
        while not over.wait(1) and not model.shown.ended:
            pass
        if model.shown.error:
            tell(f"{model.shown.error}: choose another model in the settings")
        over.wait()
        # First, or what waits would begin once whoever follows an answer has gone.
        tell(service.close() or "Ended; the conversations are kept.")
        service.uploads.clear()
        # Whoever listens is not waited for, of which uvicorn would complain.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        page.server.config.timeout_graceful_shutdown = 0
        page.close(verbose=False)


def _theme() -> Any:
    import gradio as gr

    return gr.themes.Base(
        primary_hue="teal",
        neutral_hue="slate",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"],
    ).set(  # gradio's own are too faint to read for many
        body_text_color_subdued="*neutral_500",
        input_placeholder_color="*neutral_600",
        input_placeholder_color_dark="*neutral_300",
    )


def _free_port(host: str, first: int) -> int:
    """The first port from there on that nobody has.

    Raises:
        SettingError: there is none, or no such host.
    """
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    for port in range(first, min(first + 100, 65536)):
        with suppress(OSError), socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
            return port
    raise SettingError(
        f"no port from {first} on is free on {host}, or this machine is not called that: give "
        "another --port or --host"
    )


class _interrupts:
    """The first Ctrl-C, or a polite request to end, sets an event; a second one ends at once."""

    def __init__(self, over: threading.Event) -> None:
        self.over = over

    def __enter__(self) -> None:
        self._before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        for each in self._before:
            signal.signal(each, self._heard)

    def __exit__(self, *_: object) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.over.is_set():
            raise KeyboardInterrupt
        self.over.set()
