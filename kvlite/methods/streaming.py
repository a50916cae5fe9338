"""StreamingLLM: the first few tokens and the most recent ones."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from kvlite.methods.base import LayerView, Method
from kvlite.methods.decoding import Decoding
from kvlite.methods.select import ends

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import KVHeadGroup, Selection


# Of int32, what no position reaches.
_NEVER = 2**31 - 1


@dataclass(frozen=True)
class Streaming(Method):
    """Sinks and a rolling window, with the tokens' original positions.

    Source: "Efficient Streaming Language Models with Attention Sinks", section 3.2.

    Attributes:
        sinks: first tokens that always stay.
        roll: the window rolls while answering; else what is answered stays too.
    """

    name: ClassVar[str] = "streaming"
    summary: ClassVar[str] = "keeps the first and the latest tokens, forgets the middle"
    paper: ClassVar[str] = "Efficient Streaming Language Models with Attention Sinks, section 3.2"

    sinks: int = 4
    roll: bool = True

    def __post_init__(self) -> None:
        self.require("sinks", self.sinks >= 0, "0 or more")

    @property
    def min_budget(self) -> int:
        """Room for the sinks and one more."""
        return self.sinks + 1

    @cached_property
    def decoding(self) -> Decoding:
        """Appended to, where the window does not roll."""
        return Decoding(evict=self.evict if self.roll else None)

    def select(self, view: LayerView) -> "list[Selection]":
        """The first `sinks` slots and the last ones."""
        from kvlite.cache import Selection

        return [
            Selection(head_group, ends(head_group, self.sinks, view.budget - self.sinks))
            for head_group in view.head_groups
        ]

    def evict(self, head_group: "KVHeadGroup", budget: int, position: int) -> "Tensor":
        """The oldest entry that is not a sink."""
        age = head_group.positions.masked_fill(head_group.positions < self.sinks, _NEVER)
        return age.argmin(-1)
