"""Run what is owed to a GPU, part by part, and keep the rows: `python -m tests.gpu --out FOLDER`.

A part runs in a process of its own, for three minutes at most, and its rows are written as they
come. Run again, it goes on with the parts that are not finished. It needs a CUDA build of torch
with triton, transformers in the version that pyproject.toml names, pytest, hypothesis, psutil,
platformdirs, tomli-w, filelock, gguf, safetensors and huggingface-hub; and uses bitsandbytes if it
is installed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvlite.bench.folder import machine
from tests.gpu.models import on_a_card, rehearsal
from tests.gpu.parts import PARTS
from tests.gpu.report import written_into

LIMIT_S = 180


def main() -> int:
    """The exit code: 0 if every part finished."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="where rows go")
    parser.add_argument("--again", action="store_true", help="run finished parts again")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help="write tables of the rows into this page")
    given = parser.parse_args()
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: choose of {', '.join(PARTS)}")
    if given.report is not None:
        page = given.report.read_text(encoding="utf-8")
        given.report.write_text(written_into(page, read_all(given.out)), encoding="utf-8")
        return 0
    if not given.rehearse and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: use --rehearse to try the parts on a CPU")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.here:
        (name,) = given.parts
        run_here(name, given.out, rehearse=given.rehearse)
        return 0
    finished = [
        run_apart(name, given.out, rehearse=given.rehearse, again=given.again)
        for name in given.parts or PARTS
    ]
    return 0 if all(finished) else 1


def run_apart(name: str, out: Path, *, rehearse: bool, again: bool) -> bool:
    """Run a part in a process of its own, unless it is finished; whether it is now."""
    path = out / f"{name}.json"
    if not again and path.exists() and json.loads(path.read_text())["finished"]:
        print(f"{name}: finished before", flush=True)
        return True
    command = [sys.executable, "-m", "tests.gpu", name, "--here", "--out", str(out)]
    try:
        ran = subprocess.run([*command, *(["--rehearse"] if rehearse else [])], timeout=LIMIT_S)
        said = "finished" if ran.returncode == 0 else f"exit code {ran.returncode}"
    except subprocess.TimeoutExpired:
        said = f"stopped after {LIMIT_S} s"
    print(f"{name}: {said}", flush=True)
    return said == "finished"


def run_here(name: str, out: Path, *, rehearse: bool) -> None:
    """Run a part in this process, and write its rows as they come."""
    begun, rows = perf_counter(), list[dict[str, Any]]()

    def write(*, finished: bool) -> None:
        about = {"part": name, "question": PARTS[name].__doc__, "machine": machine()}
        seconds = round(perf_counter() - begun, 1)
        text = json.dumps({**about, "finished": finished, "seconds": seconds, "rows": rows})
        (out / f"{name}.json").write_text(text, encoding="utf-8")

    write(finished=False)
    for row in PARTS[name](rehearsal() if rehearse else on_a_card()):
        rows.append(row)
        print(f"  {row}", flush=True)
        write(finished=False)
    write(finished=True)


def read_all(out: Path) -> list[dict[str, Any]]:
    """What there is of every part, in their order."""
    files = [out / f"{name}.json" for name in PARTS]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


if __name__ == "__main__":
    sys.exit(main())
