"""The folder of a run: it is written as the run goes, and a stopped run goes on from it."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import kvlite
from kvlite.bench.prose import digest
from kvlite.bench.rows import Cells, Key, Row
from kvlite.bench.task import Task
from kvlite.config.checked_file import Damaged, from_json
from kvlite.config.paths import data_folder
from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.model.calibration import find_calibration
from kvlite.model.files import fingerprint

CONFIG, ROWS, TABLE = "config.json", "rows.jsonl", "table.md"
_INTERVALS = (
    "In brackets 95% intervals: Wilson's score interval for shares of prompts, Student's t for "
    "means. Entries and KV are what the cache really held after reading, means over the prompts."
)
# Columns of older versions, by what they are called now.
RENAMED = {"tier_bytes": "host_kv_bytes"}


class RunFolder:
    """The configuration of a run and the rows it has so far.

    Attributes:
        path: the folder.
        rows: plain values by column, oldest first.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], row: type[Row]) -> None:
        """Look at a folder, without writing to it.

        Args:
            config: all that decides what the rows will be.
            row: the class of the rows.

        Raises:
            SettingError: it holds the run of another configuration, or something else.
        """
        self.path, self._row = path, row
        self._config = from_json(json.dumps(config))
        if path.exists() and not path.is_dir():
            raise SettingError(f"--out {path} is a file: name a folder")
        if (path / CONFIG).exists():
            (before,) = _parsed(path / CONFIG, [(path / CONFIG).read_bytes()])
            self._require_same(before)
        elif path.exists() and any(path.iterdir()):
            raise SettingError(f"--out {path} holds something else than a run: name a new folder")
        self._whole, rows = _rows(path / ROWS)
        self.rows = [{**row.defaults(), **each} for each in rows]

    @property
    def done(self) -> frozenset[Key]:
        """Keys of the rows there are."""
        return frozenset(map(self._row.key, self.rows))

    def begin(self) -> None:
        """Make the folder, write the configuration, and remove a half-written last row."""
        self.path.mkdir(parents=True, exist_ok=True)
        rows = self.path / ROWS
        if rows.exists():
            with rows.open("r+b") as file:
                file.truncate(self._whole)
        text = json.dumps(self._config, indent=2)
        (self.path / CONFIG).write_text(text + "\n", encoding="utf-8")

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row to disk, before the next one begins."""
        line = json.dumps(row)
        with (self.path / ROWS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.rows.append(from_json(line))

    def write_table(
        self, title: str, lines: Sequence[Cells], machine: Mapping[str, str], total: int | None
    ) -> None:
        """Write a Markdown table of the rows' figures, and what they were measured on.

        Args:
            total: of how many rows they are; None if there is no end but that of time.
        """
        parts = [f"# {title}"]
        if total is not None and len(self.rows) < total:
            parts.append(f"Stopped after {len(self.rows):,} of {total:,} rows.")
        measured_on = ", ".join(f"{name} {value}" for name, value in machine.items())
        parts += [_markdown(lines), _INTERVALS, measured_on]
        (self.path / TABLE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    def _require_same(self, before: Any) -> None:
        now, then = _flat(self._config), _flat(before)
        for name in sorted({*now, *then}):
            if now.get(name) != then.get(name):
                raise SettingError(
                    f"--out {self.path} holds a run with {name} {then.get(name)!r}, not "
                    f"{now.get(name)!r}: give the same, or another folder"
                )


def _markdown(lines: Sequence[Cells]) -> str:
    if not lines:
        return "No rows yet."
    rows = [[text.replace("|", "\\|") for text in line.values()] for line in lines]
    head = list(lines[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _rows(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Bytes of the complete lines of a file, and their rows. A last line that was cut off, as by
    a kill, does not count."""
    text = path.read_bytes() if path.exists() else b""
    whole = text.rfind(b"\n") + 1
    rows = _parsed(path, text[:whole].splitlines())
    return whole, [{RENAMED.get(name, name): row[name] for name in row} for row in rows]


def _parsed(path: Path, texts: Sequence[bytes]) -> list[Any]:
    try:
        return [from_json(text) for text in texts]
    except Damaged:
        raise SettingError(f"{path} is damaged: name a new folder (--out)") from None


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {name: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{name}.{key}" if name else key))
    return flat


def opened(task: Task[Any], settings: Settings, model: Path, out: Path | None = None) -> RunFolder:
    """The folder that a task's rows go to.

    Args:
        model: the folder of the model's safetensors.
        out: a new one in the user's data folder by default, or if the task resumes the one of the
            same configuration.

    Raises:
        SettingError: as `RunFolder`.
    """
    options = {**task.options(), "device": settings.device, "weights": settings.weights}
    config = configuration(task.name, options, settings.model, model)
    name = digest(json.dumps(config)) if task.resumes else ""
    path = out or run_folder(task.name, name)
    return RunFolder(path, config, task.row)


def run_folder(command: str, name: str = "") -> Path:
    """The folder of a run in the user's data folder; a new one if it has no name."""
    now = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    return data_folder() / "bench" / f"{command}-{name or now}"


def configuration(
    command: str, options: Mapping[str, Any], model: str, folder: Path
) -> dict[str, Any]:
    """The command, its options, the model and its files, the machine and versions.

    Args:
        folder: of the model's safetensors.
    """
    return {
        "command": command,
        "options": dict(options),
        "model": {
            "name": model,
            "files": fingerprint(folder),
            "calibration": _calibration(options, folder),
        },
        "machine": machine(),
    }


def _calibration(options: Mapping[str, Any], folder: Path) -> str:
    specs = [*options.get("methods", ()), *filter(None, [options.get("method")])]
    if not any(parse_method(spec).needs_calibration for spec in specs):
        return "unused"
    found = find_calibration(folder)
    text = "none" if found is None else json.dumps(found.to_json())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine() -> dict[str, str]:
    """The processor and the versions that a run was measured with."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvlite": kvlite.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
