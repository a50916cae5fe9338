"""LM-Infinite: the first tokens and the most recent ones, also during prefill."""

from dataclasses import dataclass
from functools import cached_property

from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Decoding, LambdaMask, Prefilling
from kvlite.methods.select import ends
from kvlite.methods.types import KVHeadGroup, Position, Selection, Tensor


@dataclass(frozen=True)
class LMInfinite(Method):
    """A lambda-shaped mask: during prefill and decoding, each token sees the first few tokens and
    the most recent ones, and nothing else, at distances that the model was trained on.

    Sinks are as in the paper's repository, 10 to 100 there. The paper's window is the model's
    trained length; here it is the budget without the sinks. Prefill costs less than with full
    attention, but answers differ: the text in between is known only through tokens that saw it.
    As long as tokens see everything, distances are unchanged; from the first token that does not,
    they are clamped for all sinks.

    Attributes:
        sinks: first tokens that every token sees.
        limit: clamp the distance to the sinks at the window's width; else this is StreamingLLM
            applied during prefill.
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
