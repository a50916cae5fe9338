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

    compresses = _inner("compresses")
    min_budget = _inner("min_budget")
    variable_head_lens = _inner("variable_head_lens")
    respects_budget = _inner("respects_budget")
    layer_budgets = _inner("layer_budgets")
    needs = _inner("needs")
    select = _inner("select")
    head_substitutes = _inner("head_substitutes")
    prefilling = _inner("prefilling")
    decoding = _inner("decoding")
    across = _inner("across")

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        """With the method it holds fitted."""
        return replace(self, inner=self.inner.fitted(shape, calibration))
