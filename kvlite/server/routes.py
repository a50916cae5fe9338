"""The server's addresses, and how answers are sent."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvlite.errors import KvliteError, Stopped
from kvlite.server.anthropic import CreateRequest, MessagesAnswer, MessagesRequest, counted
from kvlite.server.chat import ChatAnswer
from kvlite.server.completions import CompletionAnswer
from kvlite.server.fields import (
    Chat,
    Completion,
    Detokenizing,
    Named,
    ResponseRequest,
    Tokenizing,
    ignored,
    parsed,
)
from kvlite.server.guard import Guard, object_of
from kvlite.server.models import Models
from kvlite.server.ollama import (
    OllamaAnswer,
    OllamaAsked,
    OllamaChat,
    OllamaGenerate,
)
from kvlite.server.ollama_models import OllamaModels, Shown, no_embeddings, up, version
from kvlite.server.refusals import Refusal, refusal_of
from kvlite.server.responses import ResponseAnswer, SaidBefore
from kvlite.server.served_model import ServedModel
from kvlite.server.state import ServerState
from kvlite.server.tokenizing import detokenized, tokenized
from kvlite.web.sending import LEAST, PATIENCE, Bodies, TooSlow

_LOG = logging.getLogger("kvlite.server")
_T = TypeVar("_T")
_Chunk = TypeVar("_Chunk")
_Fields = TypeVar("_Fields", bound=Named)
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")
Chunks = AsyncGenerator[dict[str, Any] | str]
_SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Answer(Protocol):
    """The answer to one request, whole or piece by piece."""

    request: Any

    async def whole(self) -> dict[str, Any]:
        """All of it."""

    def stream(self) -> Chunks:
        """What comes of it, and sentences for those who wait."""


class Api:
    """What the addresses do."""

    def __init__(self, models: Models) -> None:
        self.models, self.bodies, self.said = models, Bodies(), SaidBefore()
        self.files, self.as_ollama = models.state.files, OllamaModels(models)

    async def health(self, request: Request) -> Response:
        """Whether requests can be answered."""
        self.models.require_healthy()
        return JSONResponse({"status": "ok"})

    async def list_models(self, request: Request) -> Response:
        """All models; answered at once, whatever is being done."""
        return JSONResponse({"object": "list", "data": await self.models.about()})

    async def named_model(self, request: Request) -> Response:
        """One model by its name."""
        (about,) = await self.models.about(request.path_params["name"])
        return JSONResponse(about)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        processing = len(self.models.current.answering.going)
        conversations = self.models.current.conversations
        kept = [] if conversations is None else [*conversations.kept]
        text = self.models.state.counters.text(processing, kept)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def chat(self, request: Request) -> Response:
        """The next message of a chat."""
        return await self._answer(Chat, ChatAnswer.of, request)

    async def completions(self, request: Request) -> Response:
        """How a text goes on."""
        return await self._answer(Completion, CompletionAnswer.of, request)

    async def responses(self, request: Request) -> Response:
        """The next message, in the newer of OpenAI's two ways."""
        of = partial(ResponseAnswer.of, said=self.said)
        return await self._answer(ResponseRequest, of, request, named=True)

    async def messages(self, request: Request) -> Response:
        """The next message, in Anthropic's way."""
        return await self._answer(CreateRequest, MessagesAnswer.of, request, named=True)

    async def _answer(
        self,
        kind: type[_Fields],
        of: Callable[[ServedModel, _Fields], Awaitable[Answer]],
        request: Request,
        *,
        named: bool = False,
    ) -> Response:
        """An answer as it was asked for, streamed or whole; events that are `named` by their type
        need no end besides."""
        fields = await self._fields(kind, request)
        async with self._model(fields, request) as model:
            answer = await _unless_gone(of(model, fields), request)
            if answer.request.stream:
                end = "" if named else "data: [DONE]\n\n"
                return await _streamed(answer.stream(), request, _event, end=end)
            return JSONResponse(await _unless_gone(answer.whole(), request))

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens such a request reads."""
        fields = await self._fields(MessagesRequest, request)
        async with self._model(fields, request) as model:
            found = await _unless_gone(counted(model, fields), request)
            return JSONResponse({"input_tokens": found})

    async def response(self, request: Request) -> Response:
        """One response, as it was answered."""
        if request.query_params.get("stream") == "true":
            raise Refusal("stream is not supported: a response is here once it has come whole")
        return JSONResponse(self.said.response(request.path_params["id"]))

    async def remove_response(self, request: Request) -> Response:
        """One response goes."""
        return JSONResponse(self.said.remove(request.path_params["id"]))

    async def ollama_chat(self, request: Request) -> Response:
        """The next message of a chat, in Ollama's way."""
        return await self._in_lines(OllamaChat, request)

    async def ollama_generate(self, request: Request) -> Response:
        """The answer to a prompt, in Ollama's way."""
        return await self._in_lines(OllamaGenerate, request)

    async def ollama_show(self, request: Request) -> Response:
        """What a model is, in Ollama's way."""
        fields = await self._fields(Shown, request)
        return JSONResponse(await _unless_gone(self.as_ollama.shown(fields), request))

    async def _in_lines(self, kind: type[OllamaAsked], request: Request) -> Response:
        fields, began = await self._fields(kind, request), time.monotonic()
        async with self._model(fields, request) as model:
            answer = OllamaAnswer(model, fields, began)
            if fields.stream is False:
                return JSONResponse(await _unless_gone(answer.whole(), request))
            return await _streamed(answer.lines(), request, _line, "application/x-ndjson")

    async def add_file(self, request: Request) -> Response:
        """A document comes."""
        async with self.models.using(None) as model:
            runner = model.ready()
            made = await self.files.add(request, runner.text_limit, **runner.settings.reading)
            return JSONResponse(made)

    async def list_files(self, request: Request) -> Response:
        """All documents that came."""
        found = await asyncio.to_thread(self.files.all)
        return JSONResponse({"object": "list", "data": found, "has_more": False})

    async def file(self, request: Request) -> Response:
        """What one document is."""
        return JSONResponse(await asyncio.to_thread(self.files.about, request.path_params["id"]))

    async def remove_file(self, request: Request) -> Response:
        """One document goes."""
        return JSONResponse(await asyncio.to_thread(self.files.remove, request.path_params["id"]))

    async def file_text(self, request: Request) -> Response:
        """The text of one document."""
        found = await asyncio.to_thread(self.files.document, request.path_params["id"])
        return PlainTextResponse(found.text)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, or of a chat in its template."""
        fields = await self._fields(Tokenizing, request)
        async with self._model(fields, request) as model:
            return JSONResponse(await tokenized(model, fields))

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        fields = await self._fields(Detokenizing, request)
        async with self._model(fields, request) as model:
            return JSONResponse(await detokenized(model, fields))

    @asynccontextmanager
    async def _model(self, fields: Named, request: Request) -> AsyncIterator[ServedModel]:
        """As `Models.using`, once it is loaded if that is being done; whoever waits may leave."""
        name = fields.model
        if fields.any_model:
            name = await self.models.known(name)
        await _unless_gone(self.models.until_loaded(name), request)
        async with self.models.using(name) as model:
            yield model

    async def _fields(self, kind: type[_Fields], request: Request) -> _Fields:
        def made(plain: dict[str, Any]) -> tuple[_Fields, list[str]]:
            return parsed(kind, plain), ignored(kind, plain)

        fields, without = await object_of(self.bodies, request, made)
        if without:
            _LOG.info("fields that mean nothing here: %s", ", ".join(without))
        return fields


def make_app(models: Models) -> Starlette:
    """The server as an ASGI app."""
    api = Api(models)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        keeping = asyncio.create_task(models.keep_idle())
        yield
        keeping.cancel()
        await asyncio.to_thread(models.close)

    answering = partial(_answering, models.state)
    routes = [
        Route("/", answering(up), methods=["GET"]),
        Route("/health", answering(api.health), methods=["GET"]),
        Route("/metrics", answering(api.metrics), methods=["GET"]),
        Route("/v1/models", answering(api.list_models), methods=["GET"]),
        Route("/v1/models/{name:path}", answering(api.named_model), methods=["GET"]),
        Route("/v1/chat/completions", answering(api.chat), methods=["POST"]),
        Route("/v1/completions", answering(api.completions), methods=["POST"]),
        Route("/v1/responses", answering(api.responses), methods=["POST"]),
        Route("/v1/messages", answering(api.messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", answering(api.count_tokens), methods=["POST"]),
        Route("/v1/responses/{id}", answering(api.response), methods=["GET"]),
        Route("/v1/responses/{id}", answering(api.remove_response), methods=["DELETE"]),
        Route("/api/chat", answering(api.ollama_chat), methods=["POST"]),
        Route("/api/generate", answering(api.ollama_generate), methods=["POST"]),
        Route("/api/show", answering(api.ollama_show), methods=["POST"]),
        Route("/api/tags", answering(api.as_ollama.tags), methods=["GET"]),
        Route("/api/ps", answering(api.as_ollama.running), methods=["GET"]),
        Route("/api/version", answering(version), methods=["GET"]),
        *(Route(path, answering(no_embeddings), methods=["POST"]) for path in _EMBEDDINGS),
        Route("/v1/files", answering(api.list_files), methods=["GET"]),
        Route("/v1/files", answering(api.add_file), methods=["POST"]),
        Route("/v1/files/{id}", answering(api.file), methods=["GET"]),
        Route("/v1/files/{id}", answering(api.remove_file), methods=["DELETE"]),
        Route("/v1/files/{id}/content", answering(api.file_text), methods=["GET"]),
        Route("/tokenize", answering(api.tokenize), methods=["POST"]),
        Route("/detokenize", answering(api.detokenize), methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, config=models.state.config)],
        exception_handlers={HTTPException: _no_such_address},
        lifespan=lifespan,
    )


Handler = Callable[[Request], Awaitable[Response]]


def _answering(state: ServerState, handler: Handler) -> Handler:
    """A handler whose errors are answered in the shape of its API, until the server ends."""

    async def answer(request: Request) -> Response:
        try:
            async with state.until_end():
                return await handler(request)
        except TooSlow:
            said = f"the body comes too slowly: send {LEAST:,} bytes in {PATIENCE:.0f} s"
            return Refusal(said, 408).response(request.url.path)
        except ClientDisconnect:
            raise
        except Exception as error:
            _log(error)
            return refusal_of(error, request.url.path).response(request.url.path)

    return answer


async def _no_such_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path[:100]} is not here"
    return Refusal(said, error.status_code).response(request.url.path)


def _log(error: Exception) -> None:
    if not isinstance(error, KvliteError | Refusal):
        _LOG.error("kvlite went wrong", exc_info=error)


async def _streamed(
    chunks: AsyncGenerator[_Chunk],
    request: Request,
    encode: Callable[[_Chunk | dict[str, Any]], str],
    media_type: str = "text/event-stream",
    end: str = "",
) -> Response:
    """Chunks as they come. What goes wrong before the first one is an answer of its own."""
    first, path = await _unless_gone(anext(chunks), request), request.url.path

    async def encoded() -> AsyncIterator[str]:
        try:
            async with aclosing(chunks):
                yield encode(first)
                async for each in chunks:
                    yield encode(each)
        except Stopped:
            return
        except Exception as error:
            _log(error)
            yield encode(refusal_of(error, path).body_at(path))
        if end:
            yield end

    return StreamingResponse(encoded(), media_type=media_type, headers=_SSE)


def _line(chunk: dict[str, Any]) -> str:
    return f"{_JSON.encode(chunk)}\n"


def _event(chunk: dict[str, Any] | str) -> str:
    """A chunk as an event, a sentence as a comment."""
    if isinstance(chunk, str):
        return f": {chunk}\n\n"
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {_JSON.encode(chunk)}\n\n"


async def _unless_gone(answer: Awaitable[_T], request: Request) -> _T:
    """An answer, given up with ClientDisconnect once nobody waits for it."""
    made = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([made, gone], return_when=asyncio.FIRST_COMPLETED)
        if made.done():
            return made.result()
        raise ClientDisconnect
    finally:
        for each in (made, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
