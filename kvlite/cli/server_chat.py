"""`--server`: another program answers, by OpenAI's API. No model is loaded here."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvlite.cli import BAD_INPUT, INTERRUPTED
from kvlite.cli.console import print_json, write
from kvlite.cli.screen import answer_json, reading
from kvlite.cli.thinking import ThinkingLine
from kvlite.config.resolve import Resolved
from kvlite.config.settings import flag_of
from kvlite.documents import Document
from kvlite.errors import KvliteError, SettingError, Stopped, sentence
from kvlite.web.server_api import SAID, TAKEN, ServerAnswer, Upstream, fields_of
from kvlite.web.server_talk import Begin, Said, ServerTalk

if TYPE_CHECKING:
    from kvlite.web.openai_client import OpenAIClient

_CUT = (
    "The server cut the answer, at --max-tokens, a limit of its own, or as the context is full: in "
    "kvlite chat, ask it to go on."
)

Server = Annotated[
    str,
    typer.Option(
        "--server",
        envvar="KVLITE_SERVER",
        metavar="URL",
        help="let a server answer, as of `kvlite serve` or any other of OpenAI's API; "
        "KVLITE_API_KEY or OPENAI_API_KEY is its key",
    ),
]


def talk_with(url: str, resolved: Resolved, documents: Sequence[Document]) -> ServerTalk:
    """A conversation by the settings that were given, with --model or the server's first; the first
    message is about the documents. Raises SettingError if nothing that has models answers there; or
    it is to be told what it cannot be."""
    from kvlite.web.openai_client import OpenAIClient

    client, settings = OpenAIClient(url), resolved.settings
    fields_of(settings, resolved.given)
    _require_heard(client, resolved)
    if "model" not in resolved.given:
        settings = settings.replace({"model": client.first_model()})
    upstream = Upstream(client, [settings.model], resolved.given | {"model"})
    return ServerTalk(upstream, settings, Said(waiting=(*documents,)))


def upstream_of(url: str, resolved: Resolved) -> Upstream:
    """A server that answers what others ask, once it is known that it does. Raises SettingError if
    nothing that has models answers there; or it is to be told what it cannot be."""
    from kvlite.web.openai_client import OpenAIClient

    client = OpenAIClient(url)
    _require_heard(client, resolved)
    models = client.models()
    named = [resolved.settings.model] if "model" in resolved.given else []
    fields_of(resolved.settings, resolved.given)
    found = [*dict.fromkeys([*named, *models])] or [client.first_model()]
    return Upstream(client, found, resolved.given)


def _require_heard(client: "OpenAIClient", resolved: Resolved) -> None:
    """Raises SettingError if the server would ignore a flag; variables and profiles are for models
    here, too."""
    flags = [name for name, origin in resolved.origins.items() if origin.kind == "flag"]
    here = [flag_of(name) for name in flags if name not in SAID]
    theirs = [flag_of(name) for name in flags if name in TAKEN]
    said = " and ".join(here or theirs)
    leave = f"leave {said} out, or --server (KVLITE_SERVER)"
    if here:
        raise SettingError(f"{said} would be ignored, since the model is not here: {leave}")
    if theirs and not client.is_kvlite():
        raise SettingError(f"{said} would be ignored, since the server is not kvlite's: {leave}")


def print_served(begin: Begin, screen: Console, *, as_json: bool) -> ServerAnswer:
    """Print an answer as it comes, and what it cost; say so if it was stopped before it came."""
    answer, shown, thinking = ServerAnswer(), 0, ThinkingLine(screen, folds=not as_json)
    try:
        with reading(screen) as (bar, callbacks), thinking:
            for answer in begin(callbacks):
                bar.close()
                thinking.hear(answer.reasoning, answer.text, answer.reasoning_tokens)
                if not as_json:
                    write(answer.text[shown:])
                    shown = len(answer.text)
    except Stopped:
        screen.print("Stopped; nothing was answered.")
        return ServerAnswer(finish_reason="interrupted")
    if as_json:
        said = answer_json(answer.text, answer.reasoning)
        print_json({**said, **_plain(answer)}, readable=True)
    else:
        write("\n")
        screen.print(answer.line(), style="dim")
        if answer.finish_reason == "length":
            screen.print(_CUT, style="yellow")
    return answer


def _plain(answer: ServerAnswer) -> dict[str, Any]:
    usage = answer.usage or None
    return {"finish_reason": answer.finish_reason, "model": answer.model, "usage": usage}


def answer_lines(
    talk: ServerTalk,
    lines: Iterable[str],
    resolved: Resolved,
    screen: Console,
    *,
    as_json: bool,
    apart: bool = False,
    typed: Callable[[str], Begin | None] | None = None,
) -> bool:
    """Print what a server answers to each line, or with `apart` as if it alone were said. Where
    somebody types them, `typed` is how an answer begins, if one does. Returns whether there was a
    line. Raises typer.Exit if nobody types, and an answer was interrupted or something was
    refused."""
    begun, said, failed = talk.said, False, False
    for line in lines:
        said = True
        if apart:
            talk.said = begun
        try:
            begin = typed(line) if typed else talk.say(line.strip())
            if begin is None:
                continue
            answer = print_served(begin, screen, as_json=as_json)
        except KvliteError as error:
            screen.print(f"kvlite: {sentence(resolved.noted(error))}")
            failed = typed is None
            continue
        if answer.finish_reason == "interrupted" and typed is None:
            raise typer.Exit(INTERRUPTED)
    if failed:
        raise typer.Exit(BAD_INPUT)
    return said
