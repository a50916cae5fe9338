"""`--server`: another program answers, by OpenAI's API. No model is loaded here."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlite.cli import INTERRUPTED
from kvlite.cli.console import print_json, write
from kvlite.cli.screen import reading
from kvlite.config.resolve import Resolved
from kvlite.documents import whole_characters
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import KvliteError
from kvlite.web.openai_client import OpenAIClient, ServerAnswer, Upstream, fields_of

if TYPE_CHECKING:
    from rich.console import Console

    from kvlite.documents import Document

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


class ServerChat:
    """A conversation that a server answers. What was said goes with every message.

    Attributes:
        messages: of both sides so far.
    """

    def __init__(self, url: str, resolved: Resolved) -> None:
        """With the settings that were given; the model is --model or the server's first.

        Raises:
            SettingError: nothing that has models answers there.
        """
        settings = resolved.settings
        self._client = OpenAIClient(url)
        self._fields = fields_of(settings, resolved.given)
        if "model" not in self._fields:
            self._fields["model"] = self._client.first_model()
        system = whole_characters(settings.system)
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, callbacks: Callbacks) -> Iterator[ServerAnswer]:
        """Say something; the answer each time that some of it has come, or that it has ended.

        Raises:
            SettingError: the server refuses it, or cannot be reached.
        """
        said = [*self.messages, {"role": "user", "content": whole_characters(text)}]
        answer = ServerAnswer()
        for answer in self._client.answer(self._fields, said, callbacks):
            yield answer
        self.messages = [*said, {"role": "assistant", "content": answer.text}]


def upstream_of(url: str, resolved: Resolved) -> Upstream:
    """A server that answers what others ask, once it is known that it does.

    Raises:
        SettingError: nothing that has models answers there; or it is to be told what it cannot be.
    """
    client = OpenAIClient(url)
    models = client.models()
    named = [resolved.settings.model] if "model" in resolved.given else []
    fields_of(resolved.settings, resolved.given)
    found = [*dict.fromkeys([*named, *models])] or [client.first_model()]
    return Upstream(client, found, resolved.given)


def print_served(chat: ServerChat, text: str, screen: "Console", *, as_json: bool) -> ServerAnswer:
    """Print an answer as it comes, and what it cost.

    Raises:
        typer.Exit: it was interrupted.
    """
    answer, shown = ServerAnswer(), 0
    with reading(screen) as (bar, callbacks):
        for answer in chat.say(text, callbacks):
            bar.close()
            if not as_json:
                write(answer.text[shown:])
                shown = len(answer.text)
    if as_json:
        print_json({"answer": answer.text, **_plain(answer)}, readable=True)
    else:
        write("\n")
        screen.print(answer.line(), style="dim")
    if answer.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)
    return answer


def _plain(answer: ServerAnswer) -> dict[str, Any]:
    usage = answer.usage or None
    return {"finish_reason": answer.finish_reason, "model": answer.model, "usage": usage}


def ask_server(
    url: str,
    documents: "Sequence[Document]",
    questions: Iterator[str],
    resolved: Resolved,
    screen: "Console",
    *,
    as_json: bool,
) -> bool:
    """Print what a server answers to each question about documents, as if it alone were asked;
    whether all were answered."""
    from kvlite.model.chat_template import question_about

    for each in documents:
        if each.note:
            screen.print(f"Note: {each.note}", style="yellow")
    chat, well = ServerChat(url, resolved), True
    begin = chat.messages
    for question in questions:
        chat.messages = begin
        try:
            print_served(chat, question_about(documents, question), screen, as_json=as_json)
        except KvliteError as error:
            screen.print(f"kvlite: {error}")
            well = False
    return well
