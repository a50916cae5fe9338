"""What reading a prompt takes: bytes held afterwards, and live tensors at their peak."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from kvlite.bench.fork import Choice
from kvlite.bench.grid import label
from kvlite.bench.speed import peak_over_weights
from kvlite.cache.bits import UNCHANGED
from kvlite.cache.segment import bytes_held
from kvlite.config.units import readable
from kvlite.conversation.runner import Runner


@dataclass(frozen=True)
class MemoryRow:
    """One prompt, read alone by one method.

    Attributes:
        length: tokens read.
        method, budget, kv_bits: as asked for.
        entries_mean: entries held afterwards, mean over layers and KV heads.
        kv_bytes: storage held for them: keys, values, positions, remembered attention.
        full_kv_bytes: keys and values alone, were none dropped.
        peak_bytes: peak of live tensors over the weights while reading.
        planned_bytes: what that was expected to be; 0 in runs that did not ask.
    """

    KEY: ClassVar = ("length", "method", "budget", "kv_bits")

    length: int
    method: str
    budget: int
    kv_bits: str
    entries_mean: float
    kv_bytes: int
    full_kv_bytes: int
    peak_bytes: int
    planned_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def memory(
    runner: Runner,
    ids: Sequence[int],
    choices: Sequence[Choice],
    *,
    lengths: Sequence[int],
    done: frozenset[tuple[Any, ...]] = frozenset(),
) -> Iterator[MemoryRow]:
    """Every row of the grid that is not done yet, each method by itself.

    Args:
        ids: a text of at least the longest of `lengths`.
    """
    for length in lengths:
        for choice in choices:
            method, budget = choice.method.spec, choice.budget
            if (length, method, budget, choice.kv_bits) in done:
                continue
            talk = runner.conversation(
                method=method, budget=str(budget), kv_bits=choice.kv_bits, recall="off"
            )
            part = list(ids[:length])
            peak = peak_over_weights(runner.model.module, partial(talk.read, part))
            yield MemoryRow(
                length=length,
                method=method,
                budget=budget,
                kv_bits=choice.kv_bits,
                entries_mean=talk.cache.entries_mean,
                kv_bytes=talk.cache.nbytes,
                full_kv_bytes=runner.shape.full_kv_bytes(length, runner.model.dtype.itemsize),
                peak_bytes=peak,
                planned_bytes=max(0, talk.planned_peak_bytes - bytes_held(runner.model.tensors())),
            )


@dataclass(frozen=True)
class MemoryLine:
    """A row beside `full`'s of the same length, where that is there."""

    row: MemoryRow
    full: MemoryRow | None

    def cells(self) -> dict[str, str]:
        """What a table shows, by column; shares are of `full`'s."""
        row, full = self.row, self.full
        return {
            "tokens": f"{row.length:,}",
            "method": label(row.method, row.kv_bits),
            "budget": "all" if row.method == "full" else f"{row.budget:,}",
            "entries": f"{row.entries_mean:,.0f}",
            "KV": readable(row.kv_bytes),
            "share of full's": _share(row.kv_bytes, full.kv_bytes if full else None),
            "peak over the weights": readable(row.peak_bytes),
            "share of full's peak": _share(row.peak_bytes, full.peak_bytes if full else None),
            "planned": f"{row.planned_bytes / row.peak_bytes - 1:+.2%}"
            if row.planned_bytes
            else "?",
        }


def lines(rows: Sequence[MemoryRow]) -> list[MemoryLine]:
    """Every row, beside `full`'s."""
    full = {row.length: row for row in rows if (row.method, row.kv_bits) == ("full", UNCHANGED)}
    return [MemoryLine(row, full.get(row.length)) for row in rows]


def _share(part: int, whole: int | None) -> str:
    return "?" if not whole else f"{part / whole:.1%}"
