"""Methods around another method; the inner method defines whatever they do not override."""

from dataclasses import dataclass, field, replace
from typing import Any

from kvlite.methods.base import NO_OPTION, Method
from kvlite.methods.full import Full
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape

_FULL = Full()


def _inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name))


@dataclass(frozen=True)
class Wrapper(Method):
    """A method around another one, written after a plus sign; without one, around `full`.

    Attributes:
        inner: the inner method.
    """

    inner: Method = field(default=_FULL, metadata=NO_OPTION)

    select = _inner("select")
    needs = _inner("needs")
    prefilling = _inner("prefilling")
    decoding = _inner("decoding")
    across = _inner("across")
    min_budget = _inner("min_budget")
    layer_budgets = _inner("layer_budgets")
    needs_calibration = _inner("needs_calibration")
    needs_text = _inner("needs_text")
    compresses = _inner("compresses")
    respects_budget = _inner("respects_budget")
    variable_head_lens = _inner("variable_head_lens")

    def for_layer(self, layer: int, layers: int) -> Method:
        return replace(self, inner=self.inner.for_layer(layer, layers))

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        return replace(self, inner=self.inner.fitted(shape, calibration))

    @property
    def spec(self) -> str:
        return super().spec + (f"+{self.inner.spec}" if self.inner != _FULL else "")
