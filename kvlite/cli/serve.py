"""`kvlite serve`: other programs ask the model, by OpenAI's API."""

from typing import Annotated

import typer

from kvlite.cli.options import ApiKey, keys_of, with_resolved
from kvlite.cli.screen import console, tell_of_compiling
from kvlite.config.resolve import Resolved
from kvlite.config.units import size_or_auto
from kvlite.errors import SettingError
from kvlite.model.source import require_model

# Tokens of an answer that memory is planned for unless a setting says otherwise.
_RESERVED = 2048


@with_resolved
def serve(
    resolved: Resolved,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="the same as --model")] = None,
    host: Annotated[
        str, typer.Option(help="address to serve on; any but this machine's own needs --api-key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    api_key: ApiKey = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="let web pages use it, too: those of https://example.org, or of * for all; may be "
            "repeated",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="let requests from this machine call it so, too, such as host.docker.internal; "
            "may be repeated",
        ),
    ] = None,
    keep: Annotated[
        str,
        typer.Option(help="host memory for conversations that may go on; the rest go to disk"),
    ] = "4GiB",
    keep_disk: Annotated[str, typer.Option(help="disk for those")] = "16GiB",
    requests: Annotated[int, typer.Option(min=1, help="requests that may be open at once")] = 64,
    one_model: Annotated[
        bool, typer.Option("--one-model", help="load no other model that a request names")
    ] = False,
    stable_prefix: Annotated[
        bool,
        typer.Option(
            "--stable-prefix",
            help="where only the date or time of now has changed in instructions, tell the model "
            "the earlier one, for a day at most, so that nothing is read again; answers say so",
        ),
    ] = False,
    unload_after: Annotated[
        float,
        typer.Option(
            min=0, metavar="MINUTES", help="unload a model that nobody asks for so long; 0: never"
        ),
    ] = 60,
) -> None:
    """Serve a model to other programs: OpenAI's API at http://127.0.0.1:8000/v1.

    Requests are read one after the other and answered together. What a request has in common with
    an earlier one is not read again, whoever sent it. A request that names another model of this
    machine, as `kvlite models` lists them, has it loaded in place of this one. Ctrl-C ends it.

    Only this machine can reach it unless --host says otherwise. Unless the request or --max-tokens
    says less, an answer goes on until the model ends it or its context is full; memory is planned
    for 2,048 tokens of it (--reserve-tokens).

    Pages of localhost, and those of programs (vscode-webview://, app://), may use it; pages of
    websites only with --allow-origin.

    Examples:

      kvlite serve

      kvlite serve Qwen/Qwen3-8B --vram 20GiB --kv-bits 8

      KVLITE_API_KEY=... kvlite serve --host 0.0.0.0 --port 9000

      curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'
      -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    from kvlite.server.config import ServerConfig
    from kvlite.web.origins import host_of, origin_of, plain_host

    settings = resolved.settings if name is None else resolved.settings.replace({"model": name})
    if resolved.origins["reserve_tokens"].kind == "default":
        settings = settings.replace({"reserve_tokens": _RESERVED})
    config = ServerConfig(
        plain_host(host),
        port,
        keys_of(api_key),
        origins=[*map(origin_of, allow_origin or ())],
        hosts=[*map(host_of, allow_host or ())],
        keep=_size("--keep", keep),
        keep_disk=_size("--keep-disk", keep_disk),
        requests=requests,
        one_model=one_model,
        stable_prefix=stable_prefix,
        unload_after=60 * unload_after,
    )
    config.require_key()
    config.require_hosts()
    require_model(settings.model)
    screen = console()
    tell_of_compiling(screen)
    with screen.status("Starting"):
        from kvlite.server.serve import serve as run
    run(settings, config, tell=lambda said: screen.print(said))


def _size(flag: str, text: str) -> int:
    size = size_or_auto(flag, text, "4GiB, 500MB")
    if size is None:
        raise SettingError(f"{flag} has no auto: give 4GiB, 500MB")
    return size
