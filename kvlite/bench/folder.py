"""The folder of a run: it is written as the run goes, and a stopped run goes on from it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlite.errors import SettingError

CONFIG, ROWS = "config.json", "rows.jsonl"
# Columns of older versions, by what they are called now.
RENAMED = {"tier_bytes": "host_kv_bytes"}


class RunFolder:
    """The configuration of a run and the rows it has so far.

    Attributes:
        path: the folder.
        rows: plain values by column, oldest first.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        key: Sequence[str],
        absent: Mapping[str, Any] | None = None,
    ) -> None:
        """Look at a folder, without writing to it.

        Args:
            config: all that decides what the rows will be.
            key: columns that tell a row from every other.
            absent: values for columns that rows of older runs do not have.

        Raises:
            SettingError: it holds the run of another configuration, or something else.
        """
        self.path = path
        self._config = json.loads(json.dumps(config))
        self._key = tuple(key)
        if path.exists() and not path.is_dir():
            raise SettingError(f"--out {path} is a file: name a folder")
        if (path / CONFIG).exists():
            self._require_same(_read(path / CONFIG))
        elif path.exists() and any(path.iterdir()):
            raise SettingError(f"--out {path} holds something else than a run: name a new folder")
        self._whole, rows = _rows(path / ROWS)
        self.rows = [{**(absent or {}), **row} for row in rows]

    @property
    def done(self) -> frozenset[tuple[Any, ...]]:
        """Keys of the rows there are."""
        return frozenset(map(self.key, self.rows))

    def key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values that tell a row from every other."""
        return tuple(row[name] for name in self._key)

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
        self.rows.append(json.loads(line))

    def _require_same(self, before: Any) -> None:
        now, then = _flat(self._config), _flat(before)
        for name in sorted({*now, *then}):
            if now.get(name) != then.get(name):
                raise SettingError(
                    f"--out {self.path} holds a run with {name} {then.get(name)!r}, not "
                    f"{now.get(name)!r}: give the same, or another folder"
                )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise SettingError(f"{path} is damaged: name a new folder (--out)") from None


def _rows(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Bytes of the complete lines of a file, and their rows. A last line that was cut off, as by
    a kill, does not count."""
    text = path.read_bytes() if path.exists() else b""
    whole = text.rfind(b"\n") + 1
    try:
        rows = [json.loads(line) for line in text[:whole].splitlines()]
    except ValueError:
        raise SettingError(f"{path} is damaged: name a new folder (--out)") from None
    return whole, [{RENAMED.get(name, name): row[name] for name in row} for row in rows]


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    """Nested values by dotted names."""
    if not isinstance(values, dict):
        return {name: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{name}.{key}" if name else key))
    return flat
