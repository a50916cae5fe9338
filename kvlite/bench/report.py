"""What a run leaves for people: a Markdown table, and plots where matplotlib is installed."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from kvlite.bench.rows import Cells

TABLE = "table.md"
NO_PLOTS = 'no plots: matplotlib is not installed (pip install "kvlite[bench]")'
INTERVALS = (
    "In brackets 95% intervals: Wilson's score interval for shares of prompts, Student's t for "
    "means. Entries and KV are what the cache really held after reading, means over the prompts."
)


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_table(
    folder: Path,
    title: str,
    lines: Sequence[Cells],
    machine: Mapping[str, str],
    *,
    done: int,
    total: int | None,
) -> None:
    """Write a Markdown table of a run's figures, and what they were measured on.

    Args:
        done, total: rows there are, of how many; None if there is no end but that of time.
    """
    parts = [f"# {title}"]
    if total is not None and done < total:
        parts.append(f"Stopped after {done:,} of {total:,} rows.")
    parts += [_markdown(lines), INTERVALS, ", ".join(f"{k} {v}" for k, v in machine.items())]
    (folder / TABLE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _markdown(lines: Sequence[Cells]) -> str:
    if not lines:
        return "No rows yet."
    rows = [[text.replace("|", "\\|") for text in line.values()] for line in lines]
    head = list(lines[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
