"""Others' caches on the same prompts: kvpress and transformers' quantized ones, in an environment
of their own, since they want another transformers. `peer_program.py` is what runs there."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from venv import EnvBuilder

import torch

from kvlite.bench.case import Case
from kvlite.bench.options import NO_RECALL
from kvlite.cache.bits import UNCHANGED
from kvlite.config.checked_file import from_json
from kvlite.config.paths import data_folder
from kvlite.config.settings import Settings
from kvlite.errors import KvliteError, ModelError, SettingError
from kvlite.model.devices import choose_devices
from kvlite.model.gguf.index import gguf_alone
from kvlite.model.load import LoadedModel
from kvlite.model.weights import PLAIN, Weights
from kvlite.offload.weights.loader import open_whole

PACKAGES = ("kvpress>=0.5.5,<0.6", "hqq>=0.2.8,<0.3")
INSTALL = "kvlite bench install-peers"
PROGRAM = Path(__file__).with_name("peer_program.py")
_PRESS, _QUANTIZED = re.compile(r"kvpress:\w+"), re.compile(r"transformers:hqq[248]")
_VERSIONS = """
import json
from importlib.metadata import version
print(json.dumps({name: version(name) for name in ("kvpress", "transformers", "torch")}))
"""


def environment() -> Path:
    """The folder of the environment that peers run in."""
    return data_folder() / "peers"


def python(folder: Path) -> Path:
    """The Python of an environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def install(notify: Callable[[str], None]) -> dict[str, str]:
    """Make the environment, with the same torch as here.

    Args:
        notify: called with a sentence before what takes long.

    Returns:
        Versions, as `versions`.

    Raises:
        SettingError: packages cannot be had.
    """
    folder = environment()
    notify(f"Making an environment in {folder}")
    EnvBuilder(clear=True, with_pip=True).create(folder)
    notify(f"Installing {', '.join(PACKAGES)}")
    own_torch = f"torch=={torch.__version__.partition('+')[0]}"
    pip = [str(python(folder)), "-m", "pip", "install", "--quiet", *PACKAGES, own_torch]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        last = done.stdout.strip().rpartition("\n")[2]
        raise SettingError(f"{INSTALL} found no way to install {', '.join(PACKAGES)}: {last}")
    return versions()


def versions() -> dict[str, str]:
    """Versions of what the environment has.

    Raises:
        SettingError: there is no environment.
    """
    try:
        done = subprocess.run(
            [str(python(environment())), "-I", "-c", _VERSIONS], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        raise SettingError(
            f"--peer needs an environment of its own, which is not there: {INSTALL} makes it in "
            f"{environment()}"
        ) from None
    found: dict[str, str] = from_json(done.stdout)
    return found


def require_peers(specs: Sequence[str]) -> None:
    """Raises SettingError for the first name that is no peer's."""
    for spec in specs:
        if not (_PRESS.fullmatch(spec) or _QUANTIZED.fullmatch(spec)):
            raise SettingError(
                f"--peer {spec!r} is neither a press of kvpress, as kvpress:snapkv, nor a "
                "quantized cache of transformers, as transformers:hqq4"
            )


def require_one_card(settings: Settings, beside: str) -> None:
    """Raises SettingError if the model goes over several cards, but another program that runs
    `beside` it does not."""
    if len(choose_devices(settings.device)) > 1:
        raise SettingError(
            f"--device {settings.device} is several cards, and {beside} runs on one: name one"
        )


@dataclass(frozen=True)
class PeerChoice:
    """One way to keep a prompt.

    Attributes:
        spec: as `kvpress:snapkv`.
        budget: entries a KV head, mean over layers, when all of the prompt was read.
    """

    spec: str
    budget: int

    @property
    def columns(self) -> dict[str, Any]:
        """Which choice it is, as rows name it."""
        return {
            "method": self.spec,
            "budget": self.budget,
            "kv_bits": UNCHANGED,
            "recall": NO_RECALL,
        }


def peer_choices(specs: Sequence[str], budgets: Sequence[int], longest: int) -> list[PeerChoice]:
    """Every press with every budget; quantized caches, which drop nothing, once."""
    return [
        PeerChoice(spec, budget)
        for spec in specs
        for budget in (budgets if _PRESS.fullmatch(spec) else [longest])
    ]


def _unpacked(path: Path, model: LoadedModel, folder: Path) -> Path:
    name = next(name for name in PLAIN if PLAIN[name] == model.dtype)
    weights = Weights(name, model.dtype)
    module, _ = open_whole(path, device=torch.device("cpu"), weights=weights)
    module.save_pretrained(folder)
    return folder


class PeerProgram:
    """The program in its environment; it ends with this process, or when closed."""

    def __init__(self, model: LoadedModel, path: Path, choices: Sequence[PeerChoice]) -> None:
        """Start it, with the model.

        Args:
            path: the model's folder. Of a GGUF file, a copy of its weights is written for others,
                until this is closed.
            choices: what will be asked of it.

        Raises:
            SettingError: one is no press of kvpress.
            ModelError: it cannot open the model.
        """
        self.model, self.choices = model, choices
        self._copy = TemporaryDirectory() if gguf_alone(path) else None
        if self._copy is not None:
            path = _unpacked(path, model, Path(self._copy.name))
        self._running = subprocess.Popen(
            [str(python(environment())), "-I", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
        )
        asked = {
            "peers": list(dict.fromkeys(choice.spec for choice in choices)),
            "model": str(path),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "threads": torch.get_num_threads(),
        }
        try:
            answer = self._ask(asked, "the model")
            if "unknown" in answer:
                raise SettingError(
                    f"--peer {answer['unknown']} is none of kvpress' presses that take a "
                    f"compression ratio alone: {', '.join(answer['presses'])}"
                )
        except KvliteError:
            self.close()
            raise

    def told(self, choice: PeerChoice, case: Case, *, known: bool) -> dict[str, Any]:
        """What it answers to a case.

        Args:
            known: the question is read with the context, and entries are kept for it. Else it is
                read after the cut, and counts among the entries that the budget allows.

        Raises:
            ModelError: it cannot.
        """
        question = () if known else case.question
        return self._ask(
            {
                "peer": choice.spec,
                "keep": max(1, choice.budget - len(question)),
                "context": case.prompt if known else case.context,
                "question": question,
                "forced": case.forced,
                "at_keys": case.at_keys,
                "stop": sorted(self.model.stop_ids),
                "new_tokens": case.new_tokens,
            },
            choice.spec,
        )

    def close(self) -> None:
        """End it."""
        self._running.communicate()
        if self._copy is not None:
            self._copy.cleanup()

    def _ask(self, asked: Mapping[str, Any], about: str) -> dict[str, Any]:
        assert self._running.stdin is not None and self._running.stdout is not None
        try:
            self._running.stdin.write(json.dumps(asked) + "\n")
            self._running.stdin.flush()
            line = self._running.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = from_json(line) if line else {"error": "its program has ended"}
        if "error" in answer:
            raise ModelError(f"--peer: {about} fails in {environment()}: {answer['error']}")
        return answer
