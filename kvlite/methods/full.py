"""Keep everything: the reference."""

from dataclasses import dataclass

from kvlite.methods.base import LayerView, Method
from kvlite.methods.types import Selection


@dataclass(frozen=True)
class Full(Method):
    """Every token stays in the cache, as in any other runner; nothing is freed."""

    name = "full"
    summary = "keeps everything; what the others are measured against"
    paper = "Attention Is All You Need, section 3.2"

    compresses = False

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        return [seen] * layers

    def select(self, view: LayerView) -> list[Selection]:
        raise AssertionError("full keeps everything")
