"""Another program answers, by OpenAI's API. Nothing of a model is imported here, so that the first
token of a warm server comes at once."""

import asyncio
import os
import re
import socket
import threading
from collections.abc import AsyncGenerator, Collection, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlite.config.checked_file import Damaged, from_json, sound
from kvlite.config.settings import Settings
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError, reason

if TYPE_CHECKING:
    import httpx

# Settings that servers know, by the names of OpenAI's API, vLLM and llama.cpp.
FIELDS = {
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
            *("presence_penalty", "frequency_penalty", "stop"),
        )
    },
    "max_new_tokens": "max_tokens",
}
# Those that kvlite's own server takes besides, under `kvlite`.
TAKEN = (
    *("method", "budget", "kv_bits", "recall", "recall_bits", "recall_entries", "speculate"),
    "never_lossy",
)
# Of reasoning, by the names of kvlite, vLLM, SGLang and llama.cpp; others may refuse them.
REASONS = ("thinking", "reasoning_budget")
# All that a server can be told, or that is done before it is.
SAID = {*FIELDS, *TAKEN, *REASONS, "model", "system", "logit_bias", "schema", "ocr", "encoding"}
_READING = re.compile(r": reading, ([0-9]+)%")
# Seconds between two looks at whether nobody wants the answer any more.
_BEAT = 0.05
# Seconds without a word after which a server is given up. kvlite's own says every 5 how far it is.
SILENCE = 600.0

Message = dict[str, str]


@dataclass
class ServerAnswer:
    """An answer, as far as it has come.

    Attributes:
        usage: its cost, if the server says so.
        thoughts: in how many parts its reasoning came.
    """

    text: str = ""
    reasoning: str = ""
    thoughts: int = 0
    finish_reason: str | None = None
    model: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of its reasoning; until the server says so, the parts in which it came."""
        details = self.usage.get("completion_tokens_details")
        return _count(details, "reasoning_tokens") or self.thoughts

    def line(self) -> str:
        """What it cost, in words."""
        read, made = (_count(self.usage, each) for each in ("prompt_tokens", "completion_tokens"))
        if not made:
            return self.model
        known = _count(self.usage.get("prompt_tokens_details"), "cached_tokens")
        said = f", {known:,} of them known" if known else ""
        return f"{self.model}: {read:,} tokens sent{said}, {made:,} generated"


class OpenAIClient:
    """A server whose API begins at `url`, with the key that the environment has for it."""

    def __init__(self, url: str) -> None:
        """Raises SettingError if this is no address."""
        import httpx

        if not re.match("https?://", url):
            if "://" in url:
                raise SettingError(
                    f"--server {url} is no address of a server: begin it with http://"
                )
            url = f"http://{url}"
        try:
            path = httpx.URL(url).path.strip("/")
        except httpx.InvalidURL as error:
            raise SettingError(f"--server {url} is no address ({error}): correct it") from None
        self.url = url.rstrip("/") if path else f"{url.rstrip('/')}/v1"
        # What others may read: no password, no query.
        self._named = str(httpx.URL(url).copy_with(userinfo=b"", query=None))
        key = os.environ.get("KVLITE_API_KEY") or os.environ.get("OPENAI_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def models(self) -> list[str]:
        """What its models are called; none if it does not say. Raises SettingError if nothing
        answers there, or not to this key."""
        return [str(each["id"]) for each in self._listed()]

    def is_kvlite(self) -> bool:
        """Whether it says that its models are kvlite's. Raises SettingError as `models`."""
        return any(each.get("owned_by") == "kvlite" for each in self._listed())

    def _listed(self) -> list[dict[str, Any]]:
        import httpx

        async def got() -> httpx.Response:
            async with httpx.AsyncClient(**self._how) as client:
                return await client.get(f"{self.url}/models", timeout=10)

        try:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                response = runner.run(got())
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise self._unreachable(error) from None
        if response.status_code not in (200, 404):
            raise self._refused(_message(response))
        try:
            with sound():
                return [{**each, "id": each["id"]} for each in from_json(response.content)["data"]]
        except Damaged:
            return []

    def first_model(self) -> str:
        """The server's first model. Raises SettingError as `models`, or if it does not say."""
        found = self.models()
        if not found:
            raise self._refused("it has no /models: name one (--model)")
        return found[0]

    def answer(
        self,
        fields: dict[str, Any],
        messages: Sequence[Message],
        callbacks: Callbacks,
    ) -> Generator[ServerAnswer]:
        """Answer messages: the answer each time that some of it has come, and once it has ended.
        Cancelled, it ends where it is, and the server is left. Raises SettingError if the server
        refuses it, or cannot be reached.

        Args:
            fields: of the request; they name the model.
            callbacks: told how much of the messages the server has read, where it says so.
        """
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**fields, "messages": [*messages], **streamed}
        answer = ServerAnswer(model=str(fields["model"]))
        with closing(self._lines("/chat/completions", body, callbacks)) as lines:
            for line in lines:
                if callbacks.progress is not None and (known := _READING.match(line)):
                    callbacks.progress(int(known[1]), 100)
                name, _, data = line.partition(":")
                if name == "data" and data.strip() != "[DONE]" and self._took(answer, data):
                    yield answer
        if callbacks.cancelled:
            answer.finish_reason = "interrupted"
        yield answer

    def _took(self, answer: ServerAnswer, data: str) -> bool:
        """Take a chunk of the stream; whether it has text or reasoning."""
        with sound(lambda why: self._refused(f"it sends no OpenAI chunks ({why})")):
            chunk = from_json(data)
            if "error" in chunk:
                raise self._refused(_error_text(chunk))
            answer.usage |= chunk.get("usage") or {}
            choice = (chunk.get("choices") or [{}])[0]
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            thought = thought if isinstance(thought, str) else ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            answer.text += text
            answer.reasoning += thought
            answer.thoughts += bool(thought)
        return bool(text or thought)

    def _lines(self, path: str, body: dict[str, Any], callbacks: Callbacks) -> Generator[str]:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            # Closing the runner cancels what is awaited, which ends the answer there.
            lines = self._heard(path, body)
            while (line := runner.run(_next(lines, callbacks))) is not None:
                yield line

    async def _heard(self, path: str, body: dict[str, Any]) -> AsyncGenerator[str]:
        import httpx

        try:
            async with (
                httpx.AsyncClient(**self._how) as client,
                client.stream("POST", self.url + path, json=body) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise self._refused(_message(response))
                # An answer may hold characters that httpx takes for ends of lines.
                rest = b""
                async for part in response.aiter_bytes():
                    *whole, rest = (rest + part).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace").removesuffix("\r")
                yield rest.decode(errors="replace")
        except httpx.ReadTimeout:
            raise SettingError(
                f"--server {self._named} has said nothing for {SILENCE:g} seconds: look whether it "
                "is well, or ask for less at once"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise self._unreachable(error) from None

    @property
    def _how(self) -> dict[str, Any]:
        import httpx

        timeout = httpx.Timeout(SILENCE, connect=10.0)
        return {"headers": self._headers, "timeout": timeout, "trust_env": False}

    def _refused(self, why: str) -> SettingError:
        return SettingError(f"--server {self._named} did not answer: {why[:300]}")

    def _unreachable(self, error: Exception) -> SettingError:
        return SettingError(
            f"--server {self._named} cannot be reached ({reason(error)}): start `kvlite serve`, or "
            "check the address"
        )


@dataclass(frozen=True)
class Upstream:
    """A server that answers in the place of a model here.

    Attributes:
        models: what its models are called.
        given: names of the settings that were given, which go along even where they are the usual
            ones.
    """

    client: OpenAIClient
    models: Sequence[str]
    given: frozenset[str]


class _Loop(asyncio.SelectorEventLoop):
    """Looks names up in threads that nobody waits for: a lookup cannot be ended, and takes many
    seconds where no name server answers."""

    async def getaddrinfo(self, *args: Any, **given: Any) -> Any:
        found = Future[Any]()
        found.set_running_or_notify_cancel()

        def look() -> None:
            try:
                found.set_result(socket.getaddrinfo(*args, **given))
            except Exception as error:
                found.set_exception(error)

        threading.Thread(target=look, name="kvlite lookup", daemon=True).start()
        return await asyncio.wrap_future(found, loop=self)


async def _next(lines: AsyncGenerator[str], callbacks: Callbacks) -> str | None:
    coming = asyncio.ensure_future(anext(lines, None))
    while not coming.done():
        await asyncio.wait({coming}, timeout=_BEAT)
        if callbacks.cancelled:
            coming.cancel()
    return None if callbacks.cancelled else coming.result()


def fields_of(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    """Settings as fields of a request; raises SettingError if one cannot be said to a server."""
    said = {to: getattr(settings, name) for name, to in FIELDS.items() if name in names}
    made = {to: value for to, value in said.items() if value is not None}
    if "model" in names:
        made["model"] = settings.model
    if settings.thinking != "auto":
        switch = ("enable_thinking", "thinking")
        made["chat_template_kwargs"] = dict.fromkeys(switch, settings.thinking == "on")
    if settings.reasoning_budget is not None:
        made["thinking_token_budget"] = settings.reasoning_budget
    if settings.logit_bias:
        pairs = (each.partition(":") for each in settings.logit_bias)
        made["logit_bias"] = {token: float(bias) for token, _, bias in pairs}
    if settings.schema:
        made["response_format"] = _format(settings.schema.strip())
    if own := {name: getattr(settings, name) for name in TAKEN if name in names}:
        made["kvlite"] = own
    return made


def _format(schema: str) -> dict[str, Any]:
    if schema == "json":
        return {"type": "json_object"}
    if not schema.startswith("{"):
        raise SettingError("--schema with --server is a JSON Schema, or json: not a grammar")
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": from_json(schema)},
    }


def _count(usage: Any, name: str) -> int:
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if isinstance(found, int) else 0


def _message(response: "httpx.Response") -> str:
    try:
        with sound():
            return _error_text(from_json(response.content))
    except Damaged:
        return f"HTTP {response.status_code}"


def _error_text(said: dict[str, Any]) -> str:
    """What an error says: OpenAI's are objects, some servers' are plain texts."""
    error = said["error"]
    return error if isinstance(error, str) else str(error["message"])
