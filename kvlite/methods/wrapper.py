"""Methods around another method: whatever they do not say themselves, the one they hold says."""

from dataclasses import dataclass, field, replace
from typing import Any

from kvlite.methods.base import NO_OPTION, Method
from kvlite.methods.full import Full
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape

_FULL = Full()


def _inner(name: str) -> Any:
    """A member that the method held answers for."""
    return property(lambda self: getattr(self.inner, name))


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

    frees_memory = _inner("frees_memory")
    uses_calibration = _inner("uses_calibration")
    by_attention = _inner("by_attention")
    least_budget = _inner("least_budget")
    ragged = _inner("ragged")
    keeps_to_budget = _inner("keeps_to_budget")
    budgets = _inner("budgets")
    observation = _inner("observation")
    outlook = _inner("outlook")
    select = _inner("select")
    stand_ins = _inner("stand_ins")
    prefilling = _inner("prefilling")
    decoding = _inner("decoding")
    across = _inner("across")

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        """With the method it holds fitted."""
        return replace(self, inner=self.inner.fitted(shape, calibration))
