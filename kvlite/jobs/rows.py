"""Files of rows: JSON lines, CSV, Parquet."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kvlite.config.plain_json import NotPlain, read_json
from kvlite.errors import SettingError, reason

COLUMNS = "id, question, and document (a file) or text"
# A field of a CSV file may hold a whole document.
_LONGEST_FIELD = 64 << 20

Named = tuple[str, Mapping[str, Any]]
"""A row, and what errors call it."""


def json_rows(path: str) -> Iterator[Named]:
    """Objects, one a line; errors are SettingErrors, as of all of these."""
    with _opened(path) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = read_json(line)
            except NotPlain as error:
                raise SettingError(f"{where}: {error}") from None
            except ValueError as error:
                raise SettingError(f"{where} is no JSON ({reason(error)}): mend it") from error
            if not isinstance(row, dict):
                raise SettingError(f"{where} is no JSON object: each line needs {COLUMNS}")
            yield where, row


def csv_rows(path: str) -> Iterator[Named]:
    """Rows with commas, below their columns' names."""
    csv.field_size_limit(_LONGEST_FIELD)
    with _opened(path) as file:
        rows = csv.DictReader(_lines(file, path), strict=True)
        try:
            columns = rows.fieldnames or []
            if columns and "id" not in columns:
                raise SettingError(
                    f"{path} has the columns {', '.join(columns)}: it needs {COLUMNS}, with commas "
                    "between them"
                )
            for row in rows:
                where = f"{path} line {rows.line_num}"
                if None in row:  # fields past the last column
                    count = len(columns) + len(row[None])
                    raise SettingError(
                        f"{where} has {count} fields for {len(columns)} columns: put a text that "
                        "has commas in quotes"
                    )
                yield where, row
        except csv.Error as error:
            raise SettingError(
                f"{path} line {rows.line_num} is no CSV ({reason(error)}): mend it"
            ) from error


def parquet_rows(path: str) -> Iterator[Named]:
    """Rows of a Parquet file."""
    arrow, parquet = pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for part in file.iter_batches(1000) for row in part.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path} row {number}", row
    except (arrow.ArrowException, OSError) as error:
        raise SettingError(f"{path} is no Parquet file ({reason(error)}): check it") from error


def pyarrow() -> tuple[Any, Any]:
    """pyarrow, and its module for Parquet."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise SettingError(
            "Parquet files need pyarrow, which is not installed: pip install 'kvlite[cluster]', or "
            "use .jsonl"
        ) from error
    return pyarrow, parquet


def _opened(path: str) -> Any:
    try:
        return open(path, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({reason(error)}): check it") from error


def _lines(file: Iterable[str], path: str) -> Iterator[str]:
    try:
        yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{path} cannot be read ({reason(error)}): give a file in UTF-8"
        ) from error


READERS: dict[str, Callable[[str], Iterator[Named]]] = {
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".csv": csv_rows,
    ".parquet": parquet_rows,
}
"""What reads a file of rows, by the end of its name."""


def is_batch_file(path: str) -> bool:
    """Whether a file has requests in the form of OpenAI's batches."""
    if READERS.get(Path(path).suffix.lower()) is not json_rows or not os.path.isfile(path):
        return False
    return any("custom_id" in row for _, row in islice(json_rows(path), 1))
