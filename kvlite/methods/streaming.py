"""StreamingLLM: the first few tokens and the most recent ones."""

from dataclasses import dataclass
from functools import cached_property

from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Decoding
from kvlite.methods.select import ends
from kvlite.methods.types import KVHeadGroup, Position, Selection, Tensor

# The largest int32, which no position reaches.
_NEVER = 2**31 - 1


@dataclass(frozen=True)
class Streaming(Method):
    """Keeps sinks and a sliding window, with the tokens' original positions.

    Attributes:
        sinks: first tokens that always stay.
        roll: let the window slide while answering; else the whole answer stays, too.
    """

    name = "streaming"
    summary = "keeps the first and the latest tokens, forgets the middle"
    paper = "Efficient Streaming Language Models with Attention Sinks, section 3.2"

    sinks: int = 4
    roll: bool = True

    at_least = {"sinks": 0}

    @property
    def min_budget(self) -> int:
        return self.sinks + 1

    @cached_property
    def decoding(self) -> Decoding:
        return Decoding(evict=self.evict if self.roll else None)

    def select(self, view: LayerView) -> list[Selection]:
        window = view.budget - self.sinks
        return view.keep(ends(head_group, self.sinks, window) for head_group in view.head_groups)

    def evict(self, head_group: KVHeadGroup, budget: int, position: Position) -> Tensor:
        """The oldest entry that is not a sink."""
        age = head_group.positions.masked_fill(head_group.positions < self.sinks, _NEVER)
        return age.argmin(-1)
