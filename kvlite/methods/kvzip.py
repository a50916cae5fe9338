"""KVzip: what the model needs to repeat all it has read."""

from dataclasses import dataclass
from functools import cached_property

from kvlite.methods.allocation import LayerLine
from kvlite.methods.capabilities import Decoding, Prefilling, Reconstruction
from kvlite.methods.scored import Scored
from kvlite.methods.scores import Window
from kvlite.methods.types import KVHeadGroup, Tensor


@dataclass(frozen=True)
class KVzip(Scored):
    """Has the model repeat what it read, and keeps the entries that got the most attention from any
    one query of that, in whichever head or layer. So no question is needed.

    An entry's score is the attention of a passage's queries to the passage's entries, the first
    ones and the repetition itself; the maximum over queries and over a KV head's query heads; all
    heads of all layers compete. The paper asks for repetitions in the chat template, here they are
    asked for in plain words. Tokens of later turns, answers included, are repeated when they are
    cut for the first time. Heads compete for up to four budgets each. Reading takes about three
    times as long.

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
        return window.beside(head_group.scores())
