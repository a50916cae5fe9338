"""LM-Infinite: the first tokens and the most recent ones, while reading too."""

from dataclasses import dataclass
from functools import cached_property

from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Decoding, LambdaMask, Prefilling
from kvlite.methods.select import ends
from kvlite.methods.types import KVHeadGroup, Position, Selection, Tensor


@dataclass(frozen=True)
class LMInfinite(Method):
    """A lambda-shaped mask: each token, when it is read and when it is drawn, sees the first few
    tokens and the most recent ones, and nothing else, from distances that the model was trained on.

    Sinks as in the paper's repository, 10 to 100 there. Its window is the model's trained length;
    here it is what the budget leaves beside the sinks. Reading costs less than with everything in
    sight, and the answer is another one: what was read in between is known only through the tokens
    that saw it. Tokens that see everything see it as usual: the limit begins with the first token
    that does not, for all sinks.

    Attributes:
        sinks: first tokens that always stay in sight.
        limit: hold the distance to the sinks at the window's width, so that it never grows; else
            this is StreamingLLM applied while reading.
    """

    name = "lminfinite"
    summary = "reads and answers seeing only the first and latest tokens"
    paper = (
        "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models, section 4"
    )

    sinks: int = 10
    limit: bool = True

    at_least = {"sinks": 0}

    @property
    def min_budget(self) -> int:
        return self.sinks + 1

    @cached_property
    def prefilling(self) -> Prefilling:
        return Prefilling(mask=self.mask)

    @cached_property
    def decoding(self) -> Decoding:
        return Decoding(evict=self.evict)

    def mask(self, budget: int) -> LambdaMask:
        """The sinks, and what the budget leaves beside them."""
        sinks = min(self.sinks, budget - 1)
        return LambdaMask(sinks, budget - sinks, self.limit and sinks > 0)

    def select(self, view: LayerView) -> list[Selection]:
        mask = self.mask(view.budget)
        groups = view.head_groups
        return view.keep(ends(head_group, mask.sinks, mask.window) for head_group in groups)

    def evict(self, head_group: KVHeadGroup, budget: int, position: Position) -> Tensor:
        """The oldest entry that is not a sink."""
        return head_group.positions.kthvalue(self.mask(budget).sinks + 1).indices
