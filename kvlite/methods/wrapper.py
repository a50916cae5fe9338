"""Methods around another method: whatever they do not say themselves, the one they hold says."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvlite.methods.across import Across
from kvlite.methods.base import NO_OPTION, LayerView, Method, Outlook
from kvlite.methods.decoding import Decoding
from kvlite.methods.full import Full
from kvlite.methods.prefilling import Prefilling
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape

if TYPE_CHECKING:
    from kvlite.cache import Selection

_FULL = Full()


@dataclass(frozen=True)
class Holding(Method):
    """A method that holds another, written after a plus sign; alone, `full`.

    Attributes:
        inner: the one it holds.
    """

    inner: Method = field(default=_FULL, metadata=NO_OPTION)

    @property
    def spec(self) -> str:
        """Its own options, and the method it holds."""
        return super().spec + (f"+{self.inner.spec}" if self.inner != _FULL else "")

    @property
    def frees_memory(self) -> bool:
        """As the method it holds; so are all the following."""
        return self.inner.frees_memory

    @property
    def uses_calibration(self) -> bool:
        """See `Method`."""
        return self.inner.uses_calibration

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        """With the method it holds fitted."""
        return replace(self, inner=self.inner.fitted(shape, calibration))

    @property
    def across(self) -> Across:
        """See `Method`."""
        return self.inner.across

    def select(self, view: LayerView) -> "list[Selection]":
        """See `Method`."""
        return self.inner.select(view)

    def stand_ins(self, view: LayerView) -> dict[int, int]:
        """See `Method`."""
        return self.inner.stand_ins(view)

    def budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """See `Method`."""
        return self.inner.budgets(layers, average, seen)

    @property
    def by_attention(self) -> bool:
        """See `Method`."""
        return self.inner.by_attention

    def observation(self, budget: int) -> int:
        """See `Method`."""
        return self.inner.observation(budget)

    @property
    def outlook(self) -> Outlook | None:
        """See `Method`."""
        return self.inner.outlook

    @property
    def prefilling(self) -> Prefilling:
        """See `Method`."""
        return self.inner.prefilling

    @property
    def decoding(self) -> Decoding:
        """See `Method`."""
        return self.inner.decoding

    @property
    def least_budget(self) -> int:
        """See `Method`."""
        return self.inner.least_budget

    @property
    def ragged(self) -> bool:
        """See `Method`."""
        return self.inner.ragged

    @property
    def keeps_to_budget(self) -> bool:
        """See `Method`."""
        return self.inner.keeps_to_budget
