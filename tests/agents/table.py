"""Agents: how each is installed and run, and what the model says to it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agents.install import install_npm, install_pip

TASK = "Read the file note.txt, then change the word blue in it to green."
BEFORE, AFTER = "The sky is blue.\n", "The sky is green.\n"


@dataclass(frozen=True)
class Agent:
    """An agent.

    Attributes:
        name: as `kvlite agent-config` has it.
        package: what is installed, and by what.
        command: that gives it the task; its first word is the program.
        answers: of the model, in turn. PATH stands for the file.
        mark: what the task's prompts have; a tool's name.
        env: what it is told besides, for headless use.
        install: by its name and package, which returns its programs' folder and its version.
        told: whether `kvlite agent-config` knows it; others have OPENAI_BASE_URL and MODEL.
    """

    name: str
    package: str
    command: Sequence[str]
    answers: Sequence[str]
    mark: str
    env: tuple[tuple[str, str], ...] = ()
    install: Callable[[str, str], tuple[Path, str]] = install_npm
    told: bool = True


def call(name: str, **arguments: Any) -> str:
    """A call, as the template's models write it."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def _named(name: str) -> str:
    """A tool, as the template lists it."""
    return f'"name": "{name}"'


def _sdk(name: str, packages: str) -> Agent:
    """A program of `sdk.py`, which `kvlite agent-config` does not know."""
    answers = (
        call("read_file", path="PATH"),
        call("edit_file", path="PATH", old=OLD, new=NEW, times=None),
    )
    command = ("python", str(Path(__file__).with_name("sdk.py")), name, TASK)
    mark = _named("edit_file")
    return Agent(name, packages, command, answers, mark, install=install_pip, told=False)


OLD, NEW = BEFORE.strip(), AFTER.strip()

AGENTS = (
    Agent(
        "claude-code",
        "@anthropic-ai/claude-code@2.1",
        ("claude", "-p", TASK, "--permission-mode", "acceptEdits"),
        (
            call("Read", file_path="PATH"),
            call("Edit", file_path="PATH", old_string=OLD, new_string=NEW),
        ),
        _named("Edit"),
    ),
    Agent(
        "codex",
        "@openai/codex@0.171",
        ("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK),
        (
            call("exec_command", cmd="cat note.txt"),
            call("exec_command", cmd="sed -i s/blue/green/ note.txt"),
        ),
        _named("exec_command"),
    ),
    Agent(
        "opencode",
        "opencode-ai@latest",
        ("opencode", "run", TASK),
        (
            call("read", filePath="PATH"),
            call("edit", filePath="PATH", oldString=OLD, newString=NEW),
        ),
        _named("edit"),
    ),
    Agent(
        "qwen-code",
        "@qwen-code/qwen-code",
        ("qwen", "-p", TASK, "-y"),
        (
            call("read_file", file_path="PATH"),
            call("edit", file_path="PATH", old_string=OLD, new_string=NEW),
        ),
        _named("edit"),
    ),
    Agent(
        "continue",
        "@continuedev/cli",
        ("cn", "-p", TASK, "--auto"),
        (
            call("Read", filepath="PATH"),
            call("Edit", file_path="PATH", old_string=OLD, new_string=NEW),
        ),
        _named("Edit"),
    ),
    Agent(
        "cline",
        "cline",
        ("cline", TASK),
        (
            call("read_files", files=[{"path": "PATH"}]),
            call("editor", path="PATH", old_text=OLD, new_text=NEW),
        ),
        _named("editor"),
    ),
    Agent(
        "aider",
        "aider-chat",
        ("aider", "--yes-always", "--no-git", "--no-check-update", "--message", TASK, "note.txt"),
        # Of a model that it does not know it wants whole files.
        (f"note.txt\n```\n{AFTER}```\n",),
        "note.txt",
        (("AIDER_ANALYTICS", "false"),),
        install_pip,
    ),
    _sdk("pydantic-ai", "pydantic-ai-slim[openai]"),
    _sdk("openai-agents", "openai-agents"),
    _sdk("langgraph", "langgraph langchain langchain-openai"),
)
