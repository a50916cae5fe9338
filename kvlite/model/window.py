"""What a layer sees that does not see everything before it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LocalWindow:
    """A sliding window, or the chunk that a token is in.

    Attributes:
        size: the most tokens that one sees, itself included.
        chunked: it begins at a multiple of `size` and does not slide (Llama 4).
    """

    size: int
    chunked: bool = False

    def visible(self, position: int) -> int:
        """The most entries, its own included, that the token at a position sees."""
        return position % self.size + 1 if self.chunked else self.size

    def sees(self, i: "Tensor", j: "Tensor") -> "Tensor":
        """Whether tokens at positions `i` see those at positions `j`."""
        first = i - i % self.size if self.chunked else i - self.size + 1
        return (j <= i) & (j >= first)

    def entries(self, tokens: int) -> int:
        """How many of the first `tokens` a later one may still see."""
        return tokens % self.size if self.chunked else min(tokens, self.size)

    def bends(self, most: int) -> set[int]:
        """Lengths up to `most` tokens behind which it grows no further: where chunks are all but
        full, the first and the last of these."""
        size = self.size
        return {size - 1, most - most % size - 1} if self.chunked else {size}
