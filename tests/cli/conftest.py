"""The program as tests run it: what it printed, a model that loads in no time, a document."""

import io
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer.main
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlite.cli.main import main
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.conversation.conversation import Conversation
from kvlite.documents import reading
from kvlite.model.source import find_model
from tests.conftest import ARCHITECTURES, SIZES
from tests.documents.conftest import here

LIMIT = 512
# All commands are made once, as they are in a program.
COMMANDS = cache(typer.main.get_command)


@dataclass(frozen=True)
class Done:
    """What a run of the program left."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output, one line long."""
        assert self.out.endswith("}\n")
        assert self.out.count("\n") == 1
        return dict(json.loads(self.out))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """JSON objects, one a line of standard output."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Done]
Refused = Callable[..., None]
Typed = Callable[[str], None]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's data go, who has none yet; profiles go beside it, into `config`."""
    for name in ("data", "config"):
        monkeypatch.setenv(f"KVLITE_{name.upper()}", str(tmp_path / name))
    return tmp_path / "data"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Puts lines on standard input."""
    return lambda lines: monkeypatch.setattr(sys, "stdin", io.StringIO(lines))


@pytest.fixture
def kvlite(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*args: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["kvlite", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # main sets it, this restores it
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.main.get_command", COMMANDS)
    # Documents are read in this process: where the program has one of its own, in a child of it.
    monkeypatch.setattr(reading, "run_in_child", here)
    # Where tests run for the first time, loops are compiled.
    monkeypatch.setattr(logging.getLogger("kvlite.compiling"), "disabled", True)
    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the embedded model's tokenizer, loaded in no time."""
    return model_of(tmp_path_factory.mktemp("tiny"), LIMIT)


def model_of(folder: Path, most: int, kind: str = "llama") -> Path:
    """Such a model for so many tokens, in a folder; `kind` is one of `ARCHITECTURES`."""
    for file in find_model(EMBEDDED_MODEL).iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, folder)
    sizes = {"vocab_size": 49152, "hidden_size": 32, "max_position_embeddings": most}
    name, changes = ARCHITECTURES[kind]
    config = getattr(transformers, name)(**{**SIZES, **changes, **sizes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A document of some 300 tokens."""
    path = tmp_path / "text.txt"
    path.write_text("The cat sat on the mat and the dog lay by the door. " * 20)
    return path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What conversations were told, in order."""
    heard: list[str] = []
    stream = Conversation.stream

    def listen(self: Conversation, text: str, **given: Any) -> Any:
        heard.append(text)
        return stream(self, text, **given)

    monkeypatch.setattr(Conversation, "stream", listen)
    return heard


def tokens(model: Path, message: str) -> int:
    """Length of a user's message in the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    talk = [{"role": "user", "content": message}]
    prompt = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return len(tokenizer.encode(prompt, add_special_tokens=False))


def one_sentence(done: Done, *named: object) -> None:
    """One line on standard error, which names the value and the remedy; exit code 2."""
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"kvlite: .{20,}\n", done.err)
    for part in named:
        assert str(part) in done.err


@pytest.fixture
def refused(kvlite: Run, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Checks that arguments are refused, before a weight is read."""

    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("weights would be read")

    def refused(args: Sequence[object], *named: object) -> None:
        monkeypatch.setattr("kvlite.conversation.runner.load_model", load_model)
        one_sentence(kvlite(*args), *named)

    return refused
