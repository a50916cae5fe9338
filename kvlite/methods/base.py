"""What a method is: how much each layer keeps, which entries, and what gives way in decode."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from kvlite.errors import SettingError
from kvlite.methods.across import Across
from kvlite.methods.allocation import uniform
from kvlite.methods.decoding import Decoding
from kvlite.methods.prefilling import Prefilling
from kvlite.methods.scores import Window
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape

if TYPE_CHECKING:
    from kvlite.cache import KVHeadGroup, Line, Selection


@dataclass(frozen=True)
class Outlook:
    """What a method wants to know of the queries still to come.

    Attributes:
        future: next positions they are expected at.
        skipped: first positions whose queries do not count.
    """

    future: int
    skipped: int


@dataclass(frozen=True)
class LayerView:
    """One layer as it stands when all new tokens went through it.

    Attributes:
        layer: its index in the model.
        head_groups: every candidate, old and new, ascending in position within a head.
        window: the last queries read, as many as `Method.needs` asks for.
        budget: entries a KV head may keep.
        provision: entries it may keep until all layers are read, for methods whose layers share
            the budget by their votes; else None.
        head_alias: KV heads dropped before, which are in no head group, and the head that stands in
            for each.
    """

    layer: int
    head_groups: "list[KVHeadGroup]"
    window: Window
    budget: int
    provision: int | None = None
    head_alias: Mapping[int, int] = field(default_factory=dict)

    @property
    def lines(self) -> "list[Line]":
        """What each head group holds."""
        return [(len(head_group.heads), head_group.used) for head_group in self.head_groups]


@dataclass(frozen=True)
class Needs:
    """What a method has to be given to choose; nothing, for some.

    Attributes:
        queries: how many of the last queries read `select` wants in `view.window`; or, given the
            budget, how many.
        attention: it chooses by attention, of queries in `view.window` or remembered by a head
            group, so that `view.window.backend` may lie elsewhere; else that is on the device.
        outlook: what it wants to know of the queries to come, in `view.window`.
        calibration: `fitted` looks at what was measured of the model.
    """

    queries: int | Callable[[int], int] = 0
    attention: bool = False
    outlook: Outlook | None = None
    calibration: bool = False

    def num_queries(self, budget: int) -> int:
        """How many of the last queries it wants."""
        return self.queries(budget) if callable(self.queries) else self.queries


NO_OPTION = {"option": False}
"""Metadata of a method's field that is no option of the user's."""


@dataclass(frozen=True)
class Method(ABC):
    """A way to keep a cache small. Pure: all state is in the head groups it is shown.

    Subclasses are frozen dataclasses; their fields are the options a user can set. What they say
    of reading, answering and whole layers depends on these alone, and is made once: the engine
    asks for it in every layer of every step.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]

    @property
    def compresses(self) -> bool:
        """Whether it ever drops anything."""
        return True

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> "Method":
        """This method for one model: what depends on it, and was left open, filled in.

        Args:
            calibration: what was measured of the model, if it was.

        Raises:
            SettingError: it needs a calibration and there is none.
        """
        return self

    def require_calibration(self, calibration: Calibration | None) -> Calibration:
        """The calibration.

        Raises:
            SettingError: there is none.
        """
        if calibration is None:
            raise SettingError(
                f"{self.spec} needs to know this model's heads and layers: run `kvlite calibrate "
                "MODEL` once, which takes a few minutes"
            )
        return calibration

    @cached_property
    def across(self) -> Across:
        """What it decides about whole layers: merges them, lets them share the budget, or leaves
        them to other methods."""
        return Across()

    @abstractmethod
    def select(self, view: LayerView) -> "list[Selection]":
        """Which entries of a layer stay, once it has been read; called only if it holds more
        than its budget."""

    def head_substitutes(self, view: LayerView) -> dict[int, int]:
        """KV heads that a layer drops altogether, and for each the head whose attention output
        takes the place of its own from then on; asked with `select`."""
        return {}

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """Entries a KV head each layer keeps, summing to `layers * average`.

        Args:
            average: mean entries a KV head and layer, windows and sinks included.
            seen: tokens read so far.
        """
        return uniform(average, layers)

    @cached_property
    def needs(self) -> Needs:
        """What it has to be given to choose."""
        return Needs()

    @cached_property
    def prefilling(self) -> Prefilling:
        """What is left out, or done once more, while a text is read."""
        return Prefilling()

    @cached_property
    def decoding(self) -> Decoding:
        """What becomes of entries while answering."""
        return Decoding()

    @property
    def caches_scores(self) -> bool:
        """Whether rows hold what was found while reading, and are kept from turn to turn, instead
        of beginning anew with the last queries."""
        return self.decoding.cumulative or self.prefilling.reconstruction is not None

    @property
    def min_budget(self) -> int:
        """The smallest mean budget that makes sense."""
        return 1

    @property
    def variable_head_lens(self) -> bool:
        """Whether a layer's heads may keep different numbers of entries, of the same mean."""
        return False

    @property
    def respects_budget(self) -> bool:
        """Whether a cut leaves no more than the budget."""
        return True

    def require(self, option: str, holds: bool, policy: str) -> None:
        """Raises SettingError naming the option if its value breaks `policy`."""
        if not holds:
            value = getattr(self, option)
            raise SettingError(f"{self.name}:{option}={value} is out of range: it must be {policy}")

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """The options a user can set, and their defaults."""
        return {
            option.name: option.default
            for option in fields(cls)
            if option.metadata.get("option", True)
        }

    @property
    def spec(self) -> str:
        """How a user writes this method: its name and the options that are not defaults."""
        options = [
            f"{name}={getattr(self, name)}"
            for name, default in self.defaults().items()
            if getattr(self, name) != default
        ]
        return f"{self.name}:{','.join(options)}" if options else self.name
