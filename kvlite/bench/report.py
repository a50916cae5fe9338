"""What a run leaves for people: a Markdown table, and plots where matplotlib is there."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

TABLE = "table.md"
NO_PLOTS = 'no plots: matplotlib is not installed (pip install "kvlite[bench]")'
INTERVALS = (
    "In brackets 95% intervals: Wilson's score interval for shares of prompts, Student's t for "
    "means. Entries and KV are what the cache really held after reading, means over the prompts."
)


class Line(Protocol):
    """A line of a table."""

    def cells(self) -> dict[str, str]:
        """Texts by column."""
        ...


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_table(
    folder: Path,
    title: str,
    lines: Sequence[Line],
    machine: Mapping[str, str],
    *,
    done: int,
    total: int,
) -> Path:
    """A Markdown table of a run's figures, and what they were made on.

    Args:
        done, total: rows there are, of how many.
    """
    parts = [f"# {title}"]
    if done < total:
        parts.append(f"Stopped after {done:,} of {total:,} rows.")
    parts += [markdown(lines), INTERVALS, ", ".join(f"{k} {v}" for k, v in machine.items())]
    path = folder / TABLE
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def markdown(lines: Sequence[Line]) -> str:
    """Lines as a Markdown table; they have the same columns."""
    if not lines:
        return "No rows yet."
    rows = [[_escaped(text) for text in line.cells().values()] for line in lines]
    head = list(lines[0].cells())
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
