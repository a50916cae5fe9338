"""PyramidKV: SnapKV's choice, with more entries for the first layers and fewer for the last."""

from dataclasses import dataclass

from kvlite.methods.allocation import LayerLine, Rounding, Short, pyramid
from kvlite.methods.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Budgets fall linearly from layer to layer; within a layer it chooses as SnapKV does.

    Window, pooling and beta are as in the paper's experiments (section 5.1).

    Attributes:
        beta: steepness of the pyramid; 1 is SnapKV.
        rounding: "exact" keeps to the budget; "official" rounds as the released code, which exceeds
            it.
        short: how prompts under twice the budget divide it: "uniform" or "reflect".
        least: chosen entries that every layer gets.
    """

    name = "pyramidkv"
    summary = "like snapkv, with larger budgets in the lower layers"
    paper = (
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, "
        "section 4.2"
    )

    window: int = 8
    layers: LayerLine = "pyramid"
    rounding: Rounding = "exact"
    short: Short = "uniform"
    least: int = 1

    at_least = {"least": 1}

    @property
    def respects_budget(self) -> bool:
        return self.rounding == "exact"

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        if self.layers != "pyramid" or seen <= average:
            return super().layer_budgets(layers, average, seen)
        return pyramid(
            average,
            layers,
            seen,
            window=self.window,
            beta=self.beta,
            rounding=self.rounding,
            short=self.short,
            least=self.least,
        )
