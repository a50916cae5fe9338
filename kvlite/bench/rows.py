"""Rows of a run, and how they are summed up for tables and plots."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from math import inf
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

from kvlite.bench.intervals import Estimate, mean_of, share_of
from kvlite.bench.options import NO_RECALL
from kvlite.cache.bits import UNCHANGED
from kvlite.config.units import readable

Key = tuple[Any, ...]
Cells = dict[str, str]
"""A line of a table: text by column."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Columns with a default were added later: rows of older runs do not have them.
    """

    KEY: ClassVar[tuple[str, ...]]
    """Columns that tell a row from every other."""

    def to_json(self) -> dict[str, Any]:
        """Plain values by column."""
        return asdict(self)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """What rows of older runs have in columns that were added later."""
        return {each.name: each.default for each in fields(cls) if each.default is not MISSING}

    @classmethod
    def key(cls, columns: Mapping[str, Any]) -> Key:
        """The values of `KEY`."""
        return tuple(columns[name] for name in cls.KEY)


@dataclass(frozen=True, kw_only=True)
class QualityRow(Row):
    """How well one prompt is remembered.

    Attributes:
        length: tokens asked for.
        recall: "off", or what was recalled, as in "128 of 4 bits".
        entries_mean, kv_bytes: what the cache held after reading.
        index_bytes, host_kv_bytes: what recall took besides, on the device and in host memory.
    """

    BOUNDS: ClassVar[Mapping[str, tuple[float, float]]]
    """Columns that are averaged, with the lowest and highest value that each can have."""

    length: int
    method: str
    budget: int
    kv_bits: str
    recall: str = NO_RECALL
    entries_mean: float
    kv_bytes: int
    index_bytes: int = 0
    host_kv_bytes: int = 0


Q = TypeVar("Q", bound=QualityRow)


def label(method: str, kv_bits: str, recall: str = NO_RECALL) -> str:
    """A method with its bits and recall, as tables and plots name it."""
    width = "" if kv_bits == UNCHANGED else f", {kv_bits} bits"
    return method + width + ("" if recall == NO_RECALL else f", recall {recall}")


def shown_budget(method: str, budget: int) -> str:
    """A budget for a table."""
    return "all" if method == "full" else f"{budget:,}"


@dataclass(frozen=True)
class Tally(Generic[Q]):
    """Rows of one way to keep a prompt, summed up."""

    rows: list[Q]

    @property
    def label(self) -> str:
        """The method with its bits and recall."""
        row = self.rows[0]
        return label(row.method, row.kv_bits, row.recall)

    def values(self, column: str) -> list[float]:
        """A column of the rows."""
        return [getattr(row, column) for row in self.rows]

    @property
    def kv_bytes(self) -> float:
        """Mean bytes on the device, recall's index included."""
        return fmean(row.kv_bytes + row.index_bytes for row in self.rows)

    def estimate(self, column: str) -> Estimate:
        """The mean of a column, or the share of rows where it is true."""
        values = self.values(column)
        if column == "hit":
            return share_of(int(sum(values)), len(values))
        return mean_of(values, *self.rows[0].BOUNDS.get(column, (-inf, inf)))

    def shown_hits(self) -> str:
        """`5 of 9 (27% to 81%)`."""
        share = self.estimate("hit")
        return (
            f"{sum(self.values('hit'))} of {len(self.rows)} ({share.low:.0%} to {share.high:.0%})"
        )

    def setting(self) -> Cells:
        """The columns that all tables of quality have."""
        row = self.rows[0]
        return {
            "tokens": f"{row.length:,}",
            "method": label(row.method, row.kv_bits),
            "budget": shown_budget(row.method, row.budget),
            "recall": row.recall,
            "entries": f"{fmean(self.values('entries_mean')):,.0f}",
            "KV": readable(self.kv_bytes),
        }


def tallies(rows: Iterable[Q], *by: str) -> list[Tally[Q]]:
    """Rows in groups of one length, method, budget, bits and recall, in their order.

    Args:
        by: further columns in which the rows of a group are equal.
    """
    groups: dict[Key, list[Q]] = {}
    for row in rows:
        setting = (row.length, row.method, row.budget, row.kv_bits, row.recall)
        groups.setdefault((*(getattr(row, name) for name in by), *setting), []).append(row)
    return [Tally(group) for group in groups.values()]


@dataclass(frozen=True)
class Curve:
    """A quality to plot.

    Attributes:
        column: of the rows.
        label: of the vertical axis, with its unit.
        share: it lies between 0 and 1.
        log: it spans powers of ten.
    """

    column: str
    label: str
    share: bool = False
    log: bool = False
