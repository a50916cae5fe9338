"""What is left out, or done once more, while a text is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.methods.base import LayerView


@dataclass(frozen=True)
class LambdaMask:
    """What each token sees, while reading too: the first few tokens and the most recent ones.

    A token at a position below `sinks + window` sees everything.

    Attributes:
        sinks: first tokens in sight.
        window: most recent ones in sight, a token's own included.
        limit: rotate queries and sinks as if they lay `window` tokens apart, however far they are.
    """

    sinks: int
    window: int
    limit: bool


@dataclass(frozen=True)
class Reconstruction:
    """How the model is made to repeat what it read, to see which entries it then looks at.

    Attributes:
        passage: tokens it repeats at a time.
        sinks: first entries, which it may look at beside the passage.
    """

    passage: int
    sinks: int


@dataclass(frozen=True)
class VerticalSlash:
    """What the tokens of a chunk look at while they are read, if not at all before them.

    Attributes:
        count: entries further back, a KV head: those that get most attention of the `observed`
            last queries of the chunk, the first `sinks` always among them.
        near: entries just before the chunk.
    """

    count: int
    near: int
    observed: int
    sinks: int


@dataclass(frozen=True)
class TokenPruning:
    """Tokens are left behind between layers.

    Attributes:
        widths: given the layers, the tokens to read, and the tokens seen once these are: how many
            of them each layer is given, never more than the layer before.
        narrow: given a layer, how many tokens came through it, the last entries of its head groups,
            and how many go on: which of them, `(width,)` int64, ascending, counted from the first;
            the tokens of `view.window` always among them.
    """

    widths: Callable[[int, int, int], list[int]]
    narrow: "Callable[[LayerView, int, int], Tensor]"


@dataclass(frozen=True)
class Prefilling:
    """How a method changes reading; not at all, for most.

    Attributes:
        mask: given the budget, what a token sees while it is read and when it is drawn; a layer
            then never holds more than its budget and one chunk. Such a method must evict while
            answering, and `select` and `evict` as the mask does.
        columns: what is looked at while reading; nothing is dropped for it.
        pruning: which tokens go on from layer to layer.
        reconstruction: what was read is repeated before `select` is asked, which takes some three
            times as long: a head group's one row (`decoding.rows` is 1) is then the most attention
            that each entry got.
    """

    mask: Callable[[int], LambdaMask] | None = None
    columns: VerticalSlash | None = None
    pruning: TokenPruning | None = None
    reconstruction: Reconstruction | None = None

    @property
    def exact(self) -> bool:
        """Whether every layer is given all tokens, which attend to all before them, so that the
        logits after reading are the full cache's."""
        return self.mask is None and self.columns is None and self.pruning is None
