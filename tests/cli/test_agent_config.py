"""`kvlite agent-config`: what it prints is what each agent reads."""

import json
import os
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from tests.cli.conftest import Refused, Run
from tests.server.conftest import serving

AGENTS = ("opencode", "claude-code", "codex", "qwen-code", "cline", "continue", "aider")
MODEL, API = "Qwen/Qwen3-8B", "http://127.0.0.1:9000/v1"
FLAGS = ("--model", MODEL, "--port", 9000, "--api-key", "it's secret")


def steps_of(kvlite: Run, agent: str, *flags: object) -> list[tuple[str, str]]:
    plain = kvlite("agent-config", agent, "--json", *flags).json()
    assert plain["agent"] == agent
    return [(each["where"], each["text"]) for each in plain["steps"]]


def variables(text: str) -> dict[str, str]:
    """What a shell makes of it, but for the agent, the last line."""
    *lines, _ = text.splitlines()
    done = subprocess.run(
        ["sh", "-c", "\n".join([*lines, "env"])],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("agent", AGENTS)
def test_each_agent_is_told_where_the_server_is(kvlite: Run, agent: str, tmp_path: Path) -> None:
    done = kvlite("agent-config", agent, *FLAGS)
    assert (done.code, done.err) == (0, "")
    for where, text in steps_of(kvlite, agent, *FLAGS):
        assert f"In {where}:\n\n{text}\n" in done.out
    assert "127.0.0.1:9000" in done.out and "Qwen3-8B" in done.out
    assert done.out.endswith(f"The server: kvlite serve {MODEL} --port=9000\n")
    assert "any" not in done.out.split()
    # A model of this machine is called as the server calls it.
    (tmp_path / "mine").mkdir()
    ((_, text), *_) = steps_of(kvlite, agent, "--model", tmp_path / "mine")
    assert "mine" in text and str(tmp_path) not in text and "127.0.0.1:8000" in text


def test_files_are_read_as_agents_read_them(kvlite: Run) -> None:
    ((where, text),) = steps_of(kvlite, "opencode", *FLAGS)
    made: Any = json.loads(text)
    options = {"baseURL": API, "apiKey": "it's secret"}
    assert where.startswith("opencode.json") and made["model"] == f"kvlite/{MODEL}"
    assert made["provider"]["kvlite"]["npm"] == "@ai-sdk/openai-compatible"
    assert made["provider"]["kvlite"]["options"] == options
    assert [*made["provider"]["kvlite"]["models"]] == [MODEL]
    ((where, text), (_, shell)) = steps_of(kvlite, "codex", *FLAGS)
    made = tomllib.loads(text)
    assert where.startswith("~/.codex/config.toml")
    assert (made["model"], made["model_provider"]) == (MODEL, "kvlite")
    provider = made["model_providers"]["kvlite"]
    assert (provider["base_url"], provider["wire_api"]) == (API, "responses")
    assert shell == "export KVLITE_API_KEY='it'\"'\"'s secret'\ncodex"
    assert provider["env_key"] == "KVLITE_API_KEY"
    assert "model_context_window" not in made
    ((_, text), _) = steps_of(kvlite, "codex", *FLAGS, "--context", 40960)
    assert tomllib.loads(text)["model_context_window"] == 40960
    ((_, text),) = steps_of(kvlite, "opencode", *FLAGS, "--context", 40960)
    held = json.loads(text)["provider"]["kvlite"]["models"][MODEL]
    assert held["limit"] == {"context": 40960, "output": 10240}
    ((_, text),) = steps_of(kvlite, "codex")
    assert "env_key" not in tomllib.loads(text)["model_providers"]["kvlite"]
    ((_, text),) = steps_of(kvlite, "qwen-code", *FLAGS)
    made = json.loads(text)
    (model,) = made["modelProviders"]["openai"]
    assert model["baseUrl"] == API and made["env"][model["envKey"]] == "it's secret"
    assert made["model"]["name"] == model["id"] == MODEL
    ((_, text),) = steps_of(kvlite, "continue", *FLAGS)
    head, _, listed = text.partition("models:\n  - ")
    assert head == "name: kvlite\nversion: 0.0.1\nschema: v1\n"
    model = dict(line.strip().split(": ", 1) for line in listed.splitlines())
    fields = {"provider": "openai", "model": MODEL, "apiBase": API, "apiKey": "it's secret"}
    assert fields == {name: json.loads(model[name]) for name in fields}
    assert model["capabilities"] == "[tool_use]"


@pytest.mark.skipif(os.name == "nt", reason="no sh")
def test_shells_set_what_agents_look_for(kvlite: Run) -> None:
    ((_, text),) = steps_of(kvlite, "claude-code", *FLAGS)
    found = variables(text)
    assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9000"
    assert found["ANTHROPIC_AUTH_TOKEN"] == "it's secret"
    assert found["ANTHROPIC_MODEL"] == found["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == MODEL
    assert found["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0" and text.endswith("\nclaude")
    ((_, text),) = steps_of(kvlite, "aider", "--model", "a b", "--host", "::1")
    assert variables(text)["OPENAI_API_BASE"] == "http://[::1]:8000/v1"
    assert variables(text)["OPENAI_API_KEY"] == "any"
    assert text.endswith("\naider --model 'openai/a b'")
    (_, (where, text)) = steps_of(kvlite, "cline", *FLAGS)
    auth, last = text.splitlines()
    assert where.startswith("the shell") and last == "cline"
    assert shlex.split(auth) == [
        *("cline", "auth", "-p", "openai-compatible", "-b", API),
        *("-k", "it's secret", "-m", MODEL),
    ]
    ((_, text),) = steps_of(kvlite, "aider", "--host", "0.0.0.0")
    assert variables(text)["OPENAI_API_BASE"] == "http://127.0.0.1:8000/v1"


def test_what_is_not_known_is_refused(refused: Refused) -> None:
    refused(["agent-config", "zed"], f"no agent is called 'zed': give {', '.join(AGENTS)}")
    refused(["agent-config", "codex", "--host", "http://a/b"], "'http://a/b' is no host")


def test_a_server_that_runs_is_asked_how_much_its_model_holds(
    kvlite: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    flags = "--model", tiny_folder, "--port"
    with serving(Settings(model=str(tiny_folder)), ServerConfig(folder=tmp_path)) as server:
        port = int(server.address.rpartition(":")[2])
        ((_, text),) = steps_of(kvlite, "opencode", *flags, port)
    (model,) = json.loads(text)["provider"]["kvlite"]["models"].values()
    assert model["limit"] == {"context": 1024, "output": 256}
    ((_, text),) = steps_of(kvlite, "opencode", *flags, port)  # it has ended
    assert "limit" not in text
