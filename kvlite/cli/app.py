"""`kvlite app`: the chat in a browser."""

import os
from typing import Annotated

import typer

from kvlite.cli.first_start import with_first_model
from kvlite.cli.options import ApiKey, keys_of, with_resolved
from kvlite.cli.screen import console, tell_of_compiling
from kvlite.cli.server_chat import Server, upstream_of
from kvlite.config.resolve import Resolved
from kvlite.errors import SettingError


@with_resolved
def app(
    resolved: Resolved,
    host: Annotated[
        str, typer.Option(help="address to serve on; any but this machine's own needs --auth")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="port; the next free one if it is taken")
    ] = 7860,
    auth: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:PASSWORD",
            help="a login; may be repeated, each has conversations of its own; KVLITE_AUTH sets "
            "one that no list of processes shows",
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option("--share", help="a public address through gradio's servers; needs --auth"),
    ] = False,
    browser: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
    api_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="let programs use the model, too: OpenAI's API, as of kvlite serve, at this port",
        ),
    ] = None,
    api_key: ApiKey = None,
    read_ahead: Annotated[
        bool,
        typer.Option(
            "--read-ahead/--no-read-ahead",
            help="read a document as soon as it is dropped, while its question is typed",
        ),
    ] = True,
    server: Server = "",
) -> None:
    """Chat in a browser, about documents or anything else, and see where every gigabyte goes.

    Only this machine can reach it unless --host says otherwise, and nothing is fetched from the
    internet. Ctrl-C ends it; the conversations are kept.

    Examples:

      kvlite app

      kvlite app --model Qwen/Qwen3-8B --vram 20GiB --open

      kvlite app --api-port 8000

      kvlite app --server http://127.0.0.1:8000

      kvlite app --host 0.0.0.0 --auth ann:secret --auth ben:other
    """
    from kvlite.server.config import ServerConfig as ApiConfig
    from kvlite.web.origins import plain_host
    from kvlite_app.web.guard import ServerConfig, parse_auth

    users = parse_auth(auth or (), os.environ.get("KVLITE_AUTH", ""))
    config = ServerConfig(plain_host(host), port, users, share, browser, read_ahead)
    config.require_password()
    if api_key and api_port is None:
        raise SettingError("--api-key is for programs: give --api-port, too, or leave it out")
    if server and api_port is not None:
        raise SettingError(
            f"--api-port lends out the model here, and {server} answers: leave it out, or "
            "--server (KVLITE_SERVER)"
        )
    api = None if api_port is None else ApiConfig(config.host, api_port, keys_of(api_key))
    if api is not None:
        api.require_key()
    screen = console()
    upstream = upstream_of(server, resolved) if server else None
    settings = resolved.settings
    if upstream is None:
        settings = with_first_model(resolved, screen).settings
    elif "model" not in upstream.given:
        settings = settings.replace({"model": upstream.models[0]})
    tell_of_compiling(screen)
    with screen.status("Starting"):
        from kvlite_app.serve import serve
    serve(settings, config, api, upstream, tell=lambda said: screen.print(said))
