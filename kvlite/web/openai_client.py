"""Another program answers, by OpenAI's API. Its package takes a moment to import: so does this, for
whoever has a model of their own. Nothing of a model is imported, so that a warm server's first
token comes at once."""

import asyncio
import os
import re
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
from openai._streaming import ServerSentEvent, SSEDecoder

from kvlite.config.checked_file import Damaged, sound
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError, reason
from kvlite.web.server_api import ServerAnswer

_READING = re.compile(r": reading, ([0-9]+)%")
# Seconds between two looks at whether nobody wants the answer any more.
_BEAT = 0.05
# Seconds without a word after which a server is given up. kvlite's own says every 5 how far it is.
SILENCE = 600.0


class OpenAIClient:
    """A server whose API begins at `url`, with the key that the environment has for it."""

    def __init__(self, url: str) -> None:
        """Raises SettingError if this is no address, or the key is none."""
        url = url if "://" in url else f"http://{url}"
        if not re.match("https?://", url):
            raise SettingError(f"--server {url} is no address of a server: begin it with http://")
        try:
            path = httpx.URL(url).path.strip("/")
        except httpx.InvalidURL as error:
            raise SettingError(f"--server {url} is no address ({error}): correct it") from None
        self.url = url.rstrip("/") if path else f"{url.rstrip('/')}/v1"
        # What others may read: no password, no query.
        self._named = str(httpx.URL(url).copy_with(userinfo=b"", query=None))
        self._key = os.environ.get("KVLITE_API_KEY") or os.environ.get("OPENAI_API_KEY")
        if self._key and not self._key.isascii():
            raise SettingError(
                f"--server {self._named} cannot be sent the key of KVLITE_API_KEY, which has other "
                "characters than ASCII's: correct it"
            )

    def models(self) -> list[str]:
        """What its models are called; none if it does not say. Raises SettingError if nothing
        answers there, or not to this key."""
        return [str(each.id) for each in self._listed()]

    def is_kvlite(self) -> bool:
        """Whether it says that its models are kvlite's. Raises SettingError as `models`."""
        return any(getattr(each, "owned_by", "") == "kvlite" for each in self._listed())

    def _listed(self) -> list[openai.types.Model]:
        async def listed() -> list[openai.types.Model]:
            async with self._api() as api:
                page = await api.models.list(timeout=10, extra_headers=self._headers)
                return [each for each in page.data if each.id]

        unsaid = suppress(Damaged, openai.NotFoundError)
        with self._errors_told(), unsaid, sound(), asyncio.Runner(loop_factory=_Loop) as runner:
            return runner.run(listed())
        return []

    def first_model(self) -> str:
        """The server's first model. Raises SettingError as `models`, or if it does not say."""
        for name in self.models():
            return name
        raise self._refused("it has no /models: name one (--model)")

    def answer(
        self, fields: dict[str, Any], messages: Sequence[dict[str, str]], callbacks: Callbacks
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
        with self._errors_told(), asyncio.Runner(loop_factory=_Loop) as runner:
            # Closing the runner cancels what is awaited, which ends the answer there.
            parts = self._parts(answer, body, callbacks)
            while runner.run(_next(parts, callbacks)):
                yield answer
        if callbacks.cancelled:
            answer.finish_reason = "interrupted"
        yield answer

    async def _parts(
        self, answer: ServerAnswer, body: dict[str, Any], callbacks: Callbacks
    ) -> AsyncGenerator[bool]:
        """True each time that the answer has more text or reasoning."""
        with sound(lambda why: self._refused(f"it sends no OpenAI chunks ({why})")):
            async with self._api() as api:
                api._make_sse_decoder = lambda: _Decoder(callbacks)  # type: ignore[method-assign]
                chunks = await api.post(
                    "/chat/completions",
                    body=body,
                    options={"headers": self._headers},
                    cast_to=object,
                    stream=True,
                    stream_cls=openai.AsyncStream[object],
                )
                async for chunk in chunks:
                    if answer.take(chunk):
                        yield True

    def _api(self) -> openai.AsyncOpenAI:
        timeout = httpx.Timeout(SILENCE, connect=10.0)
        web = httpx.AsyncClient(timeout=timeout, trust_env=False)
        key = self._key or "none"
        api = openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, http_client=web)
        api._custom_headers = {}  # OPENAI_CUSTOM_HEADERS, which may have secrets
        return api

    @property
    def _headers(self) -> dict[str, Any]:
        # What the environment has for OpenAI's own server is not sent to others.
        left_out = ["OpenAI-Organization", "OpenAI-Project"]
        return dict.fromkeys([*left_out, *([] if self._key else ["Authorization"])], openai.Omit())

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except (openai.APIConnectionError, httpx.HTTPError) as error:
            cause = error.__cause__  # none where a stream breaks off
            cause = cause if isinstance(cause, Exception) else error
            if isinstance(cause, httpx.ReadTimeout):
                silence = cause.request.extensions["timeout"]["read"]
                raise SettingError(
                    f"--server {self._named} has said nothing for {silence:g} seconds: look "
                    "whether it is well, or ask for less at once"
                ) from None
            raise SettingError(
                f"--server {self._named} cannot be reached ({reason(cause)}): start "
                "`kvlite serve`, or check the address"
            ) from None
        except openai.APIError as error:
            raise self._refused(_error_text(error)) from None

    def _refused(self, why: str) -> SettingError:
        return SettingError(f"--server {self._named} did not answer: {why[:300]}")


class _Decoder(SSEDecoder):
    """Hears comments, too, in which kvlite's server says how far it has read; and takes a line of
    data at once, as some servers send no empty one behind it, and some cut a character in two."""

    def __init__(self, callbacks: Callbacks) -> None:
        super().__init__()
        self._callbacks = callbacks

    async def aiter_bytes(self, iterator: AsyncIterator[bytes]) -> AsyncIterator[ServerSentEvent]:
        rest = b""
        async for part in iterator:
            *lines, rest = (rest + part).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                if event := self.decode(line.decode(errors="replace")):
                    yield event
        if event := self.decode(rest.decode(errors="replace")):
            yield event

    def decode(self, line: str) -> ServerSentEvent | None:
        known = _READING.match(line)
        if known and self._callbacks.progress is not None:
            self._callbacks.progress(int(known[1]), 100)
        name, _, data = line.partition(":")
        return ServerSentEvent(data=data.strip()) if name == "data" else None


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


async def _next(parts: AsyncGenerator[bool], callbacks: Callbacks) -> bool:
    coming = asyncio.ensure_future(anext(parts, False))
    while not coming.done():
        await asyncio.wait({coming}, timeout=_BEAT)
        if callbacks.cancelled:
            coming.cancel()
    return not callbacks.cancelled and coming.result()


def _error_text(error: openai.APIError) -> str:
    """What an error says: OpenAI's are objects, some servers' are plain texts."""
    said = error.body
    if isinstance(said, dict) and "message" in said:
        return str(said["message"])
    if isinstance(error, openai.APIStatusError):
        is_page = said == error.response.text.strip()
        return said if isinstance(said, str) and not is_page else f"HTTP {error.status_code}"
    return said if isinstance(said, str) else "it sends no OpenAI chunks"
