"""What a benchmark is: options that decide its rows, and units of work that measure them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

from kvlite.bench.fork import Choice
from kvlite.bench.grid import choices, recalled
from kvlite.bench.options import NO_RECALL, Options, RecallOptions
from kvlite.bench.rows import Cells, Curve, Key, Row, tallies
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.model.load import LoadedModel

R = TypeVar("R", bound=Row)
Work = tuple[Sequence[Key], Callable[[], Iterable[R]]]
"""Rows that are measured together: their keys, and what measures them, in this order."""


def measure(
    work: Iterable[Work[R]], done: frozenset[Key] = frozenset(), until: float = inf
) -> Iterator[R]:
    """The rows that are not done yet. Where some rows of a unit are done, the whole unit is
    measured again.

    Args:
        until: by `time.monotonic`. No unit begins that would end later if it takes as long as the
            longest so far.
    """
    longest = 0.0
    for keys, run in work:
        begun = monotonic()
        if begun + longest >= until:
            return
        if not done.issuperset(keys):
            yield from (row for key, row in zip(keys, run(), strict=True) if key not in done)
            longest = max(longest, monotonic() - begun)


@dataclass(kw_only=True)
class Task(Options, ABC, Generic[R]):
    """A benchmark. Its fields are the options that decide the rows.

    Attributes:
        title: for the progress bar, the table and plots.
        row: the class of the rows.
        curves: what is plotted against the bytes of the cache.
        resumes: whether a run that is told no folder goes on with the last of the same options.
    """

    title: ClassVar[str]
    row: ClassVar[type[Any]]
    curves: ClassVar[Sequence[Curve]] = ()
    resumes: ClassVar[bool] = False

    def options(self) -> dict[str, Any]:
        """What decides the rows, for the configuration of a run."""
        return {each.name.replace("_", " "): getattr(self, each.name) for each in fields(self)}

    def settings(self, given: Settings) -> Settings:
        """What the model is opened with."""
        return given

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Look at the rows that the run has, in a list that grows while it goes on. Called before
        `work`, for tasks that choose what to measure next by what was measured."""

    @abstractmethod
    def work(self, runner: Runner) -> Iterable[Work[R]]:
        """All rows of the run, unit by unit.

        Raises:
            SettingError: something does not fit the model, the text or host memory.
        """

    def doing(self, keys: Sequence[Key]) -> str:
        """What a unit of so many rows does, for the progress bar."""
        return self.title

    @abstractmethod
    def table(self, rows: Sequence[R]) -> list[Cells]:
        """The rows for people; every line has the same columns."""

    def summary(self, rows: Sequence[R]) -> dict[str, Any]:
        """What follows from the rows, for `--json`."""
        return {}

    def draw(self, rows: Sequence[Any], folder: Path) -> None:
        """Plot the rows; needs matplotlib."""
        from kvlite.bench.plots import draw_quality

        draw_quality(folder / f"quality-{self.name}.png", self.title, tallies(rows), self.curves)


@dataclass(kw_only=True)
class GridTask(RecallOptions, Task[R]):
    """A benchmark of methods x budgets x bits x recall.

    Attributes:
        records_recall: whether a run without recall says so in its configuration; older runs of
            some commands do not, and must go on.
        from_seeds: whether `repeats` are seeds, and so in the configuration.
    """

    records_recall: ClassVar[bool] = False
    from_seeds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises SettingError if an option is not valid."""
        ways = recalled(self.recall, self.recall_bits)
        self.choices = choices(self.methods, self.budgets, max(self.tokens), self.kv_bits, ways)

    def options(self) -> dict[str, Any]:
        """What decides the rows."""
        options = super().options()
        if self.from_seeds:
            options["seeds"] = list(range(options.pop("repeats")))
        if self.recall == [NO_RECALL] and not self.records_recall:
            del options["recall"], options["recall bits"]
        return options

    def fitted(self, model: LoadedModel) -> list[Choice]:
        """What is compared, on one model.

        Raises:
            SettingError: a method needs a calibration of the model, and there is none.
        """
        return [
            replace(each, method=each.method.fitted(model.shape, model.calibration))
            for each in self.choices
        ]
