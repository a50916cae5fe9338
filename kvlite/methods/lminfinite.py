"""LM-Infinite: the first tokens and the most recent ones, while reading too."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from kvlite.methods.base import LayerView, Method
from kvlite.methods.decoding import Decoding
from kvlite.methods.prefilling import LambdaMask, Prefilling
from kvlite.methods.select import ends

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import KVHeadGroup, Selection


@dataclass(frozen=True)
class LMInfinite(Method):
    """A lambda-shaped mask: each token, when it is read and when it is drawn, sees the first few
    tokens and the most recent ones, and nothing else, from distances that the model was trained on.

    Source: "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models",
    section 4; sinks as in its repository, 10 to 100 there. Its window is the model's trained
    length; here it is what the budget leaves beside the sinks. Reading costs less than with
    everything in sight, and the answer is another one: nothing that was read in between is known,
    but through the tokens that saw it. Tokens that see everything see it as ever: the limit begins
    with the first token that does not, for all sinks.

    Attributes:
        sinks: first tokens that always stay in sight.
        limit: hold the distance to the sinks at the window's width, so that it never grows; else
            this is StreamingLLM applied while reading.
    """

    name: ClassVar[str] = "lminfinite"
    summary: ClassVar[str] = "reads and answers seeing only the first and latest tokens"
    paper: ClassVar[str] = (
        "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models, section 4"
    )

    sinks: int = 10
    limit: bool = True

    def __post_init__(self) -> None:
        self.require("sinks", self.sinks >= 0, "0 or more")

    @property
    def min_budget(self) -> int:
        """Room for the sinks and one more."""
        return self.sinks + 1

    @cached_property
    def prefilling(self) -> Prefilling:
        """Tokens see no more while they are read."""
        return Prefilling(mask=self.mask)

    @cached_property
    def decoding(self) -> Decoding:
        """The window rolls."""
        return Decoding(evict=self.evict)

    def mask(self, budget: int) -> LambdaMask:
        """The sinks, and what the budget leaves beside them."""
        sinks = min(self.sinks, budget - 1)
        return LambdaMask(sinks, budget - sinks, self.limit and sinks > 0)

    def select(self, view: LayerView) -> "list[Selection]":
        """The first slots and the last ones."""
        from kvlite.cache import Selection

        mask = self.mask(view.budget)
        return [
            Selection(head_group, ends(head_group, mask.sinks, mask.window))
            for head_group in view.head_groups
        ]

    def evict(self, head_group: "KVHeadGroup", budget: int, position: int) -> "Tensor":
        """The oldest entry that is not a sink."""
        return head_group.positions.kthvalue(self.mask(budget).sinks + 1).indices
