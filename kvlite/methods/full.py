"""Keep everything: the yardstick."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvlite.methods.base import LayerView, Method

if TYPE_CHECKING:
    from kvlite.cache import Selection


@dataclass(frozen=True)
class Full(Method):
    """Every token stays in the cache, as in any other runner; nothing is freed."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "keeps everything; what the others are measured against"
    paper: ClassVar[str] = "Attention Is All You Need, section 3.2"

    @property
    def compresses(self) -> bool:
        """Nothing."""
        return False

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """All of it, whatever the budget."""
        return [seen] * layers

    def select(self, view: LayerView) -> "list[Selection]":
        """Never called: a full layer never holds more than its budget."""
        raise AssertionError("full keeps everything")
