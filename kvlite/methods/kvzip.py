"""KVzip: the entries that the model needs to repeat the text."""

from dataclasses import dataclass
from functools import cached_property

from kvlite.methods.allocation import LayerLine
from kvlite.methods.capabilities import Decoding, Prefilling, Reconstruction
from kvlite.methods.scored import Scored
from kvlite.methods.scores import Window
from kvlite.methods.types import KVHeadGroup, Tensor


@dataclass(frozen=True)
class KVzip(Scored):
    """Has the model repeat the text, and keeps the entries that got the most attention from any
    query of the repetition, in whichever head or layer. It needs no question.

    While a passage is repeated, queries attend to the passage's entries, the first entries and the
    repetition itself. An entry's score is the maximum over these queries and a KV head's query
    heads. All heads of all layers compete, for up to four budgets each. The paper asks for
    repetitions in the chat template; kvlite asks in plain words. Tokens of later turns, including
    answers, are repeated when they are cut for the first time. Prefill takes about three times as
    long.

    Attributes:
        sinks: first entries that stay.
        window: last entries that stay.
        passage: tokens repeated at a time.
    """

    name = "kvzip"
    summary = "keeps what it takes to repeat the text, whatever is asked"
    paper = "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, section 3"

    layers: LayerLine = "global"
    floor: float = 0.0
    sinks: int = 4
    window: int = 16
    passage: int = 2000

    at_least = {"sinks": 0, "window": 1, "passage": 1}
    decoding = Decoding(rows=1)

    @cached_property
    def prefilling(self) -> Prefilling:
        return Prefilling(reconstruction=Reconstruction(self.passage, self.sinks))

    def score(self, head_group: KVHeadGroup, window: Window) -> Tensor:
        return window.to_scoring_device(head_group.scores())
