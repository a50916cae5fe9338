"""`kvlite app`: the chat in a browser."""

import os
from typing import Annotated

import typer

from kvlite.cli.options import with_settings
from kvlite.cli.screen import console
from kvlite.config.settings import Settings


@with_settings
def app(
    settings: Settings,
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
            help="someone who may log in; may be repeated, each has conversations of their own; "
            "KVLITE_AUTH holds one that shows in no list of processes",
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="let gradio's servers lead others here by a public address; needs --auth",
        ),
    ] = False,
    browser: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
) -> None:
    """Chat in a browser, about documents or anything else, and see where every gigabyte goes.

    Only this machine can reach it unless --host says otherwise, and nothing is fetched from
    anywhere. Ctrl-C ends it; the conversations are there the next time.

    Examples:

      kvlite app

      kvlite app --model Qwen/Qwen3-8B --vram 20GiB --open

      kvlite app --host 0.0.0.0 --auth ann:secret --auth ben:other
    """
    from kvlite_app.web.guard import ServerConfig, parse_auth, plain_host

    users = parse_auth(auth or (), os.environ.get("KVLITE_AUTH", ""))
    door = ServerConfig(plain_host(host), port, users, share, browser)
    door.require_password()
    screen = console()
    with screen.status("Starting"):
        from kvlite_app.serve import serve
    serve(
        settings,
        door,
        tell=lambda said: screen.print(said),
    )
