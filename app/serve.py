"""Serves the app on this machine."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from kvlite.config.paths import data_folder
from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.server.config import ServerConfig as ApiConfig
from kvlite.web.server_api import Upstream

from .web.guard import ServerConfig

_STYLE = Path(__file__).parent / "web" / "style.css"
# Read when gradio is imported or starts: no analytics are sent, nor collected after every event.
_QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_ANALYTICS_CACHE_FREQUENCY": "1000000000",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


def serve(
    settings: Settings,
    server_config: ServerConfig,
    api_config: ApiConfig | None = None,
    upstream: Upstream | None = None,
    *,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve until someone interrupts, then keep the conversation in memory and end. The address, an
    error of loading the model, and what became of the conversations are given to `tell`.

    Args:
        api_config: how programs reach the same model by OpenAI's API; None if they cannot.
        upstream: a server that answers; None if a model is loaded here.

    Raises SettingError if others could come in without a password or a key, no port is free, or
    another app has the same conversations open.
    """
    server_config.require_password()
    api = None
    if api_config is not None:
        from .openai_server import OpenAIServer

        api = OpenAIServer(api_config)
    os.environ.update(_QUIET)
    for name in ("NO_PROXY", "no_proxy"):  # gradio sends itself a request to see that it is up
        others = os.environ.get(name, "")
        os.environ[name] = ",".join(
            filter(None, [others, "localhost", "127.0.0.1", server_config.host])
        )
    with _alone(data_folder()):
        from kvlite.conversation.library import drop_deleted

        from .engine.server_conversation import ServerHost
        from .engine.service import Service

        if upstream is None:
            service = Service(settings, reads_ahead=server_config.read_ahead)
        else:
            service = Service(settings, reads_ahead=False, host=ServerHost(settings, upstream))
        service.uploads.clear()  # of an app that was killed
        drop_deleted(data_folder())
        os.environ["GRADIO_TEMP_DIR"] = str(service.uploads.folder)
        page = _page(service, server_config, upstream)
        over = threading.Event()
        with _interrupts(over):
            address = _launch(page, service, server_config)
            model = service.load(settings)
            with nullcontext() if api is None else api.answering(service, model):
                tell(f"kvlite is at {address} (Ctrl-C ends it)")
                if api is not None:
                    tell(f"Programs find it at {api.address}")
                while not over.wait(1) and not model.shown.ended:
                    pass
                if model.shown.error:
                    tell(f"{model.shown.error}: choose another model in the settings")
                over.wait()
            # First, or waiting work would begin once those who follow an answer have gone.
            tell(service.close() or "Ended; the conversations are kept.")
            service.uploads.clear()
            # Those who still listen are not waited for; uvicorn would complain of that.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            page.server.config.timeout_graceful_shutdown = 0
            page.close(verbose=False)


def _alone(root: Path) -> AbstractContextManager[Any]:
    """Raises SettingError if another app has the conversations of this data folder open."""
    folder = root / "app"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / ".open", timeout=0).acquire()
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


def _page(service: Any, server_config: ServerConfig, upstream: Upstream | None) -> Any:
    from kvlite.model.local_models import models_here

    from .form import Models
    from .page import make_page
    from .web.gradio_patches import poll_queue_slowly

    if upstream is None:
        runnable = [each.name for each in models_here() if not each.flaw]
        models = Models(runnable, others=not server_config.auth)
    else:
        models = Models(upstream.models, others=False, here=False)
    page = make_page(service, models)
    page.queue(max_size=64, default_concurrency_limit=8)
    poll_queue_slowly(page)
    return page


def _launch(page: Any, service: Any, server_config: ServerConfig) -> str:
    from starlette.middleware import Middleware

    from .web.gradio_patches import ScriptInjector
    from .web.uploading import LARGEST, Uploading

    host = server_config.host
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
            _frontend=False,  # gradio gives up if its first request takes 3 seconds
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
    return str(shared or local)


# Colors on a light page and on a dark one; gradio's own are too faint for many to read.
_COLORS = {
    "body_text_color_subdued": ("*neutral_600", "*neutral_300"),
    "button_primary_background_fill": ("*primary_700", "*primary_700"),
    "button_primary_background_fill_hover": ("*primary_800", "*primary_800"),
    "button_secondary_background_fill": ("transparent", "transparent"),
    "button_secondary_background_fill_hover": ("*neutral_100", "*neutral_800"),
    "button_secondary_border_color": ("*neutral_300", "*neutral_600"),
    "link_text_color": ("*primary_700", "*primary_400"),
    "link_text_color_hover": ("*primary_800", "*primary_300"),
    "link_text_color_visited": ("*primary_700", "*primary_400"),
    "input_placeholder_color": ("*neutral_600", "*neutral_300"),
}


def _theme() -> Any:
    import gradio as gr

    light = {name: color for name, (color, _) in _COLORS.items()}
    dark = {f"{name}_dark": color for name, (_, color) in _COLORS.items()}
    base = gr.themes.Base(
        primary_hue="teal",
        neutral_hue="slate",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"],
    )
    others = {"button_border_width": "1px", "color_accent": "*primary_700"}
    return base.set(button_primary_text_color="white", **others, **light, **dark)


def _free_port(host: str, first: int) -> int:
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


@contextmanager
def _interrupts(over: threading.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM sets an event; a second one ends at once."""

    def heard(number: int, frame: FrameType | None) -> None:
        if over.is_set():
            raise KeyboardInterrupt
        over.set()

    before = {each: signal.signal(each, heard) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
