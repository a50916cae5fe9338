"""`kvlite agent-config`: what coding agents are told, so that they use `kvlite serve`."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from kvlite.cli.console import output, print_json
from kvlite.cli.options import AsJson, with_resolved
from kvlite.config.resolve import Resolved
from kvlite.errors import SettingError

_PORT = 8000
# Where servers listen for all addresses, none of which is one.
_ANY = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class Step:
    """What to put, and where."""

    where: str
    text: str


@dataclass(frozen=True)
class Served:
    """What agents are told of a server.

    Attributes:
        root: its address, without /v1.
        key: "" if it has none.
        context: tokens that the model holds; None if that is not told.
    """

    root: str
    model: str
    key: str
    context: int | None = None

    @property
    def api(self) -> str:
        """Where OpenAI's clients find it."""
        return f"{self.root}/v1"

    @property
    def any_key(self) -> str:
        """A key for agents that demand one."""
        return self.key or "any"


def _opencode(served: Served) -> list[Step]:
    model: dict[str, Any] = {"name": served.model}
    if served.context is not None:  # without it, opencode compacts nothing until it is refused
        model["limit"] = {"context": served.context, "output": served.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvlite",
        "options": {"baseURL": served.api, "apiKey": served.any_key},
        "models": {served.model: model},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"kvlite": provider},
        "model": f"kvlite/{served.model}",
    }
    where = "opencode.json in the project, or ~/.config/opencode/opencode.json"
    return [Step(where, _json(config))]


def _claude_code(served: Served) -> list[Step]:
    names = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL")
    exports = {
        "ANTHROPIC_BASE_URL": served.root,
        "ANTHROPIC_AUTH_TOKEN": served.any_key,
        **{f"ANTHROPIC_{name}": served.model for name in names},
        # A line that changes with every request would have all of it read again.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return [Step("the shell", _shell(exports, "claude"))]


def _codex(served: Served) -> list[Step]:
    """Its keys go before all tables of the file."""
    about = {"name": "kvlite", "base_url": served.api, "wire_api": "responses"}
    about |= {"env_key": "KVLITE_API_KEY"} if served.key else {}
    lines = [
        f"model = {_text(served.model)}",
        'model_provider = "kvlite"',
        *([] if served.context is None else [f"model_context_window = {served.context}"]),
        "",
        "[model_providers.kvlite]",
        *(f"{name} = {_text(value)}" for name, value in about.items()),
    ]
    steps = [Step("~/.codex/config.toml, at its beginning", "\n".join(lines))]
    keys = {"KVLITE_API_KEY": served.key}
    return [*steps, Step("the shell", _shell(keys, "codex"))] if served.key else steps


def _qwen_code(served: Served) -> list[Step]:
    env = "OPENAI_API_KEY"
    model = {"id": served.model, "name": served.model, "baseUrl": served.api, "envKey": env}
    config = {
        "modelProviders": {"openai": [model]},
        "env": {env: served.any_key},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": served.model},
    }
    return [Step("~/.qwen/settings.json", _json(config))]


def _cline(served: Served) -> list[Step]:
    fields = {
        "API Provider": "OpenAI Compatible",
        "Base URL": served.api,
        "API Key": served.any_key,
        "Model ID": served.model,
    }
    text = "\n".join(f"{name}: {value}" for name, value in fields.items())
    flags = {"-p": "openai-compatible", "-b": served.api, "-k": served.any_key, "-m": served.model}
    auth = shlex.join(["cline", "auth", *(each for pair in flags.items() for each in pair)])
    return [
        Step("Cline's settings in the editor", text),
        Step("the shell, for Cline's own program", _shell({}, f"{auth}\ncline")),
    ]


def _continue(served: Served) -> list[Step]:
    fields = {
        "name": served.model,
        "provider": "openai",
        "model": served.model,
        "apiBase": served.api,
        "apiKey": served.any_key,
    }
    lines = [f"    {name}: {_text(value)}" for name, value in fields.items()]
    lists = {"roles": ["chat", "edit", "apply"], "capabilities": ["tool_use"]}
    lines += [f"    {name}: [{', '.join(each)}]" for name, each in lists.items()]
    head = ["name: kvlite", "version: 0.0.1", "schema: v1", "models:", f"  - {lines[0].strip()}"]
    return [Step("~/.continue/config.yaml", "\n".join([*head, *lines[1:]]))]


def _aider(served: Served) -> list[Step]:
    exports = {"OPENAI_API_BASE": served.api, "OPENAI_API_KEY": served.any_key}
    model = shlex.quote(f"openai/{served.model}")
    return [Step("the shell", _shell(exports, f"aider --model {model}"))]


AGENTS: Mapping[str, Callable[[Served], Sequence[Step]]] = {
    "opencode": _opencode,
    "claude-code": _claude_code,
    "codex": _codex,
    "qwen-code": _qwen_code,
    "cline": _cline,
    "continue": _continue,
    "aider": _aider,
}


def _context_at(address: str, model: str, key: str) -> int | None:
    """What a server that runs there says that a model holds; None if none does."""
    import httpx

    from kvlite.config.checked_file import Damaged, from_json

    with suppress(httpx.HTTPError, Damaged, KeyError, TypeError):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        found = httpx.get(f"{address}/models/{model}", headers=headers, timeout=2, trust_env=False)
        return int(from_json(found.raise_for_status().content)["max_model_len"])
    return None


@partial(with_resolved, names=("model",))
def agent_config(
    resolved: Resolved,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help=", ".join(AGENTS))],
    host: Annotated[str, typer.Option(help="where kvlite serve is reached")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = _PORT,
    api_key: Annotated[
        str, typer.Option(metavar="KEY", help="the server's key, if it has one")
    ] = "",
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="tokens that the model holds, for agents that compact before (codex, opencode); "
            "a server that runs is asked",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what to put where so that a coding agent uses kvlite serve. No file is touched.

    Examples:

      kvlite agent-config opencode

      kvlite agent-config claude-code --model Qwen/Qwen3-8B --port 9000

      kvlite agent-config codex --json
    """
    if agent not in AGENTS:
        raise SettingError(f"no agent is called {agent[:40]!r}: give {', '.join(AGENTS)}")
    from kvlite.server.config import ServerConfig, names_of

    address = ServerConfig(host=_reached(host), port=port).address
    model = names_of(resolved.settings.model)[0]
    context = context or _context_at(address, model, api_key)
    served = Served(address.removesuffix("/v1"), model, api_key, context)
    steps = AGENTS[agent](served)
    if as_json:
        plain = [{"where": step.where, "text": step.text} for step in steps]
        print_json({"agent": agent, "address": served.root, "model": served.model, "steps": plain})
        return
    screen = output()
    for step in steps:
        screen.print(f"In {step.where}:\n", soft_wrap=True)
        screen.print(f"{step.text}\n", soft_wrap=True)
    words = [
        "kvlite",
        "serve",
        resolved.settings.model,
        *([f"--port={port}"] if port != _PORT else ()),
    ]
    screen.print(f"The server: {shlex.join(words)}", soft_wrap=True)


def _reached(host: str) -> str:
    """A server's host as others reach it."""
    from kvlite.web.origins import plain_host

    host = plain_host(host)
    if not all(each.isalnum() or each in ".:-_" for each in host):
        raise SettingError(f"--host {host[:100]!r} is no host: give a name or an IP address")
    return "127.0.0.1" if host in _ANY else host


def _json(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False)


def _text(value: str) -> str:
    """A text as JSON, TOML and YAML have it."""
    return json.dumps(value, ensure_ascii=False)


def _shell(exports: Mapping[str, str], command: str) -> str:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    return "\n".join([*lines, command])
