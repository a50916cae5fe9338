"""What reading a prompt takes: bytes held afterwards, and live tensors at their peak."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import ClassVar

from kvlite.bench.fork import Choice
from kvlite.bench.grid import fitting_prose
from kvlite.bench.options import MemoryOptions
from kvlite.bench.rows import Cells, Row, label, shown_budget
from kvlite.bench.speed import peak_over_weights
from kvlite.bench.task import GridTask, Work
from kvlite.cache.bits import UNCHANGED
from kvlite.cache.segment import bytes_held
from kvlite.config.units import readable
from kvlite.conversation.runner import Runner


@dataclass(frozen=True, kw_only=True)
class MemoryRow(Row):
    """One prompt, read alone by one method.

    Attributes:
        length: tokens read.
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


@dataclass(kw_only=True)
class Memory(MemoryOptions, GridTask[MemoryRow]):
    """Bytes of the cache, and the peak of reading."""

    title: ClassVar = "Memory of reading"
    row: ClassVar = MemoryRow

    def work(self, runner: Runner) -> list[Work[MemoryRow]]:
        ids = fitting_prose(runner, max(self.tokens), 0)
        return memory(runner, ids, self.choices, lengths=self.tokens)

    def table(self, rows: Sequence[MemoryRow]) -> list[Cells]:
        full = {row.length: row for row in rows if (row.method, row.kv_bits) == ("full", UNCHANGED)}
        return [_line(row, full.get(row.length)) for row in rows]


def memory(
    runner: Runner, ids: Sequence[int], choices: Sequence[Choice], *, lengths: Sequence[int]
) -> list[Work[MemoryRow]]:
    """The first tokens of a text, read by each method alone."""
    return [
        (
            [MemoryRow.key({"length": length, **choice.columns})],
            partial(_rows, runner, list(ids[:length]), choice),
        )
        for length, choice in product(lengths, choices)
    ]


def _rows(runner: Runner, ids: list[int], choice: Choice) -> Iterator[MemoryRow]:
    talk = runner.conversation(**choice.settings)
    peak = peak_over_weights(runner.model.module, partial(talk.read, ids))
    turn = talk.context.turn
    planned = 0 if turn is None else turn.run_stats.planned or 0
    yield MemoryRow(
        length=len(ids),
        method=choice.method.spec,
        budget=choice.budget,
        kv_bits=choice.kv_bits,
        entries_mean=talk.cache.entries_mean,
        kv_bytes=talk.cache.nbytes,
        full_kv_bytes=runner.shape.full_kv_bytes(len(ids), runner.model.dtype.itemsize),
        peak_bytes=peak,
        planned_bytes=max(0, planned - bytes_held(runner.model.tensors())),
    )


def _line(row: MemoryRow, full: MemoryRow | None) -> Cells:
    planned = f"{row.planned_bytes / row.peak_bytes - 1:+.2%}" if row.planned_bytes else "?"
    return {
        "tokens": f"{row.length:,}",
        "method": label(row.method, row.kv_bits),
        "budget": shown_budget(row.method, row.budget),
        "entries": f"{row.entries_mean:,.0f}",
        "KV": readable(row.kv_bytes),
        "share of full's": f"{row.kv_bytes / full.kv_bytes:.1%}" if full else "?",
        "peak over the weights": readable(row.peak_bytes),
        "share of full's peak": f"{row.peak_bytes / full.peak_bytes:.1%}" if full else "?",
        "planned": planned,
    }
