"""What a method is: how much each layer keeps, which entries, and what decoding evicts."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

from kvlite.errors import SettingError
from kvlite.methods.capabilities import Across, Decoding, Needs, Prefilling
from kvlite.methods.scores import Window
from kvlite.methods.types import GroupLength, KVHeadGroup, Selection, Tensor
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape


@dataclass(frozen=True)
class LayerView:
    """One layer after all new tokens went through it.

    Attributes:
        layer: its index in the model.
        head_groups: every candidate, old and new, ascending in position within a head.
        window: the last queries read, as many as `Method.needs` asks for.
        budget: entries a KV head may keep.
        candidate_budget: entries it may keep until all layers are read, for methods whose layers
            share the budget by their scores; else None.
        opening: the first queries read in this turn, as many as `Method.needs` asks for.
        structural: `(batch, end)` bool, by position, which tokens are punctuation and white space
            alone; None unless `Method.needs_text`.
    """

    layer: int
    head_groups: list[KVHeadGroup]
    window: Window
    budget: int
    candidate_budget: int | None = None
    opening: Window | None = None
    structural: "Tensor | None" = None

    @property
    def lengths(self) -> list[GroupLength]:
        """How many heads each head group has, and entries a head."""
        return [(len(head_group.heads), head_group.used) for head_group in self.head_groups]

    def keep(self, slots: Iterable[Tensor]) -> list[Selection]:
        """What `select` returns, given the slots of each head group that stay."""
        from kvlite.cache import Selection

        both = zip(self.head_groups, slots, strict=True)
        return [Selection(head_group, each) for head_group, each in both]

    def keep_all(self) -> list[Selection]:
        """What `select` returns to drop nothing."""
        from kvlite.cache import Selection

        return [Selection.everything(head_group) for head_group in self.head_groups]


NO_OPTION = {"option": False}
"""Metadata of a method's field that users cannot set."""


@dataclass(frozen=True)
class Method(ABC):
    """A way to keep a cache small. It is pure: all state is in the head groups it is shown.

    Subclasses are frozen dataclasses; their fields are the options a user can set. What depends on
    the options alone (`needs`, `prefilling`, `decoding`, `across`) is a class attribute or a cached
    property, because the engine reads it in every layer of every step.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    at_least: ClassVar[Mapping[str, int]] = {}
    """The lowest value of options that have one; those of base classes count, too."""

    def __post_init__(self) -> None:
        for kind in reversed(type(self).__mro__):
            for option, lowest in vars(kind).get("at_least", {}).items():
                self.require(option, getattr(self, option) >= lowest, f"{lowest} or more")

    @abstractmethod
    def select(self, view: LayerView) -> list[Selection]:
        """Which entries of a layer stay, once it has been read; called only if it holds more
        than its budget."""

    @cached_property
    def needs(self) -> Needs:
        """What the method needs to choose."""
        return Needs()

    @cached_property
    def prefilling(self) -> Prefilling:
        """What the method changes in prefill."""
        return Prefilling()

    @cached_property
    def decoding(self) -> Decoding:
        """What the method changes in decode."""
        return Decoding()

    @cached_property
    def across(self) -> Across:
        """What it decides about whole layers: merges them, lets them share the budget, or leaves
        them to other methods."""
        return Across()

    @property
    def min_budget(self) -> int:
        """The smallest mean budget that makes sense."""
        return 1

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """Entries a KV head of each layer keeps, summing to `layers * average`.

        Args:
            average: mean entries a KV head and layer, windows and sinks included.
            seen: tokens read so far.
        """
        return [average] * layers

    @property
    def needs_calibration(self) -> bool:
        """Whether `fitted` uses a calibration of the model."""
        return False

    @property
    def needs_text(self) -> bool:
        """Whether `select` uses the kinds of tokens read, in `view.structural`."""
        return False

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> "Method":
        """This method for one model, with what depends on the model filled in.

        Raises:
            SettingError: an option does not fit the model, or a calibration is needed and there is
                none.
        """
        return self

    @property
    def compresses(self) -> bool:
        """Whether the method ever drops anything."""
        return True

    @property
    def respects_budget(self) -> bool:
        """Whether a cut leaves no more than the budget."""
        return True

    @property
    def variable_head_lens(self) -> bool:
        """Whether heads of a layer may keep different numbers of entries, of the same mean."""
        return False

    @property
    def caches_scores(self) -> bool:
        """Whether a head group's rows hold scores found in prefill and are kept from turn to turn,
        instead of beginning anew with the last queries."""
        return self.decoding.cumulative or self.prefilling.reconstruction is not None

    def for_layer(self, layer: int, layers: int) -> "Method":
        """The method of one of the model's layers."""
        return self

    def require(self, option: str, holds: bool, policy: str) -> None:
        """Raises SettingError naming the option unless its value holds to `policy`."""
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
        """The method as a user writes it: its name, and the options that are not defaults."""
        options = [
            f"{name}={getattr(self, name)}"
            for name, default in self.defaults().items()
            if getattr(self, name) != default
        ]
        return f"{self.name}:{','.join(options)}" if options else self.name
