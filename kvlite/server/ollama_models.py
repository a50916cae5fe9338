"""What Ollama's clients ask of the server and its models."""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kvlite import __version__
from kvlite.conversation.runner import Runner
from kvlite.server.fields import Named
from kvlite.server.models import Models
from kvlite.server.ollama import iso_now
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import ServedModel

# The version of Ollama whose API this is: Visual Studio Code wants 0.6.4, and numbers alone.
_VERSION = "0.18.3"
_NEVER = timedelta(days=36500)


class Shown(Named):
    """A request for what a model is."""

    name: str | None = None


def _about(model: ServedModel, since: str) -> dict[str, Any]:
    name, local, runner = model.names[0], model.local, model.runner
    is_gguf = name.lower().endswith(".gguf") or (local is not None and local.path.is_file())
    kind = runner.shape.model_type if runner else local.architecture if local else ""
    form = "gguf" if is_gguf else "safetensors" if local else ""
    sizes = {"parameter_size": "", "quantization_level": ""}  # which nobody knows here
    return {
        "name": name,
        "model": name,
        "modified_at": since,
        "size": model.held_bytes or (local.nbytes if local else 0),
        "digest": hashlib.sha256(name.encode()).hexdigest(),  # of no file: clients tell by it
        "details": {"format": form, "family": kind, "families": [kind], **sizes},
    }


def _sizes(runner: Runner, family: str) -> dict[str, int]:
    """Of a model that is loaded; `ollama show` of 2024 ends without them."""
    shape = runner.shape
    return {
        "general.parameter_count": sum(shape.parameters.values()),
        f"{family}.embedding_length": shape.hidden,
        f"{family}.block_count": shape.layers,
    }


class OllamaModels:
    """What Ollama's clients ask of models."""

    def __init__(self, models: Models) -> None:
        self._models, self._since = models, iso_now()

    async def tags(self, request: Request) -> Response:
        """All models; answered at once, whatever is being done."""
        found = await self._models.listed()
        return JSONResponse({"models": [_about(each, self._since) for each in found]})

    async def running(self, request: Request) -> Response:
        """The model that is loaded, if one is."""
        model, found = self._models.current, list[dict[str, Any]]()
        if model.runner is not None:
            seconds = self._models.state.config.unload_after
            until = datetime.now(UTC) + (timedelta(seconds=seconds) if seconds else _NEVER)
            context = {"expires_at": until.isoformat(), "context_length": model.max_context}
            on_host = model.runner.model.device.type == "cpu"
            vram = {"size_vram": 0 if on_host else model.held_bytes}
            found = [{**_about(model, self._since), **vram, **context}]
        return JSONResponse({"models": found})

    async def shown(self, fields: Shown) -> dict[str, Any]:
        """What a model is, and can do as far as that is known: before it is loaded, it answers."""
        model = await self._models.until_loaded(fields.model or fields.name)
        about, can = _about(model, self._since), ["completion"]
        family = about["details"]["family"] or "unknown"
        if (runner := model.runner) is not None:
            form = await asyncio.to_thread(lambda: runner.model.answer_form)
            found = {"tools": form.calls, "thinking": form.reasoning}
            can += [name for name, there in found.items() if there is not None]
        info: dict[str, Any] = {"general.architecture": family, "general.basename": model.names[0]}
        if model.max_context:
            info[f"{family}.context_length"] = model.max_context
        if runner is not None:
            info |= _sizes(runner, family)
        return {
            **{name: about[name] for name in ("modified_at", "details")},
            "model_info": info,
            "capabilities": can,
        }


async def up(request: Request) -> Response:
    """That there is a server: Ollama's own program asks that before all else."""
    said = "kvlite is running: the API is at /v1, and `kvlite app` serves a page for browsers"
    return PlainTextResponse(said)


async def version(request: Request) -> Response:
    """Of the API, and of kvlite."""
    return JSONResponse({"version": _VERSION, "kvlite": __version__})


async def no_embeddings(request: Request) -> Response:
    """Raises Refusal."""
    said = "kvlite makes no embeddings: use another program, such as Ollama or llama.cpp's"
    raise Refusal(f"{said} `llama-server --embeddings`", 501, code="not_implemented")
