"""`--server`: another program answers, by OpenAI's API. No model is loaded here, and nothing of one
is imported, so that the first token of a warm server comes at once."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlite.cli import INTERRUPTED
from kvlite.cli.console import print_json, write
from kvlite.cli.screen import ReadingBar, reading
from kvlite.config.resolve import Resolved
from kvlite.documents import whole_characters
from kvlite.errors import KvliteError, SettingError, reason

if TYPE_CHECKING:
    import httpx
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

# Settings that servers know, by the names of OpenAI's API, vLLM and llama.cpp.
_FIELDS = {
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
            *("presence_penalty", "frequency_penalty", "stop"),
        )
    },
    "max_new_tokens": "max_tokens",
}
# Those that kvlite's own server takes besides.
_OWN = ("method", "budget", "kv_bits", "recall", "recall_bits", "recall_entries", "speculate")
_READING = re.compile(r": reading, ([0-9]+)%")


@dataclass
class ServerAnswer:
    """An answer, as far as it has come.

    Attributes:
        usage: what the server says that it cost; empty if it does not.
    """

    text: str = ""
    finish_reason: str | None = None
    model: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """What it cost, in words."""
        if not self.usage:
            return self.model
        read, made = (self.usage.get(each, 0) for each in ("prompt_tokens", "completion_tokens"))
        details = self.usage.get("prompt_tokens_details") or {}
        known = details.get("cached_tokens") or 0
        said = f", {known:,} of them known" if known else ""
        return f"{self.model}: {read:,} tokens sent{said}, {made:,} generated"


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
        import httpx

        if not re.match("https?://", url):
            if "://" in url:
                raise SettingError(
                    f"--server {url} is no address of a server: begin it with http://"
                )
            url = f"http://{url}"
        self.url = url.rstrip("/") if httpx.URL(url).path.strip("/") else f"{url.rstrip('/')}/v1"
        key = os.environ.get("KVLITE_API_KEY") or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=10.0)
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False)
        self._fields = _fields_of(resolved)
        if "model" not in self._fields:
            self._fields["model"] = self._first_model()
        system = whole_characters(resolved.settings.system)
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, stop: Event, bar: ReadingBar) -> Iterator[ServerAnswer]:
        """Say something; the answer each time that some of it has come, or that it has ended.

        Raises:
            SettingError: the server refuses it, or cannot be reached.
        """
        said = [*self.messages, {"role": "user", "content": whole_characters(text)}]
        body = {
            **self._fields,
            "messages": said,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = ServerAnswer(model=self._fields["model"])
        for line in self._lines("/chat/completions", body):
            if stop.is_set():
                answer.finish_reason = "interrupted"
                break
            if known := _READING.match(line):
                bar.update(int(known[1]), 100)
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            if self._took(answer, line.removeprefix("data: ")):
                yield answer
        self.messages = [*said, {"role": "assistant", "content": answer.text}]
        yield answer

    def _took(self, answer: ServerAnswer, data: str) -> bool:
        """Take a chunk of the stream; whether it has text."""
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise self._refused(str(chunk["error"].get("message")))
            answer.usage = chunk.get("usage") or answer.usage
            choice = (chunk.get("choices") or [{}])[0]
            text = (choice.get("delta") or {}).get("content") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        except (ValueError, AttributeError, TypeError) as error:
            raise self._refused(f"it sends no OpenAI chunks ({reason(error)})") from None
        answer.text += text
        return bool(text)

    def _lines(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        import httpx

        try:
            with self._client.stream("POST", self.url + path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refused(_message(response))
                yield from response.iter_lines()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None

    def _first_model(self) -> str:
        import httpx

        try:
            response = self._client.get(f"{self.url}/models", timeout=10)
            if response.status_code != 200:
                raise self._refused(_message(response))
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        except (ValueError, LookupError, TypeError):
            raise self._refused("it has no /models: name one (--model)") from None

    def _refused(self, why: str) -> SettingError:
        return SettingError(f"--server {self.url} did not answer: {why}")

    def _unreachable(self, error: Exception) -> SettingError:
        return SettingError(
            f"--server {self.url} cannot be reached ({reason(error)}): start `kvlite serve`, or "
            "check the address"
        )


def _fields_of(resolved: Resolved) -> dict[str, Any]:
    """The settings that were given, as fields of a request."""
    settings = resolved.settings
    given = {name for name, origin in resolved.origins.items() if origin.kind != "default"}
    made = {to: getattr(settings, name) for name, to in _FIELDS.items() if name in given}
    if "model" in given:
        made["model"] = settings.model
    if settings.logit_bias:
        pairs = (each.partition(":") for each in settings.logit_bias)
        made["logit_bias"] = {token: float(bias) for token, _, bias in pairs}
    if settings.schema:
        made["response_format"] = _format(settings.schema.strip())
    if own := {name: getattr(settings, name) for name in _OWN if name in given}:
        made["kvlite"] = own
    return made


def _format(schema: str) -> dict[str, Any]:
    if schema == "json":
        return {"type": "json_object"}
    if not schema.startswith("{"):
        raise SettingError("--schema with --server is a JSON Schema, or json: not a grammar")
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": json.loads(schema)},
    }


def _message(response: "httpx.Response") -> str:
    """What an error says."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status_code}"


def print_served(chat: ServerChat, text: str, screen: "Console", *, as_json: bool) -> ServerAnswer:
    """Print an answer as it comes, and what it cost.

    Raises:
        typer.Exit: it was interrupted.
    """
    answer, shown = ServerAnswer(), 0
    with reading(screen) as (bar, callbacks):
        assert callbacks.cancel is not None
        for answer in chat.say(text, callbacks.cancel, bar):
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
