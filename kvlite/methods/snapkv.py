"""SnapKV: what the end of the prompt attends to, in small clusters."""

from dataclasses import dataclass
from functools import cached_property

from kvlite.methods.capabilities import Needs
from kvlite.methods.scored import Observed


@dataclass(frozen=True)
class SnapKV(Observed):
    """Scores the earlier entries by the attention of the last `window` tokens.

    The defaults are those of the paper's repository (window 32, max pooling over 7). Scores are
    reduced over the query heads of a KV head before pooling, so a KV head is stored once.

    Attributes:
        window: the observation window: last tokens, which score the others and stay.
    """

    name = "snapkv"
    summary = "keeps what the prompt's last tokens attend to"
    paper = "SnapKV: LLM Knows What You are Looking for Before Generation, section 4"

    window: int = 32
    pool: int = 7

    at_least = {"window": 1}

    @property
    def reserved_per_layer(self) -> int:
        return self.window

    @cached_property
    def needs(self) -> Needs:
        return Needs(queries=self.window, attention=True)
