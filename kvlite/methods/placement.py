"""Where attention is turned into a choice. Here: all of it on the device that formed it."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlite.methods.types import Tensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Logits:
    """A block of rows over one head's entries, formed a part of the entries at a time.

    Attributes:
        shape: `(batch, heads per KV head, rows, entries)`.
        parts: which entries, and `(batch, heads per KV head, rows, n)` float32, on the device;
            formed when asked for, and only once.
    """

    shape: tuple[int, ...]
    parts: Iterator[tuple[slice, Tensor]]

    def whole(self) -> Tensor:
        """All parts as one tensor."""
        whole: Tensor | None = None
        for entries, part in self.parts:
            if part.shape == self.shape:
                return part
            whole = part.new_empty(self.shape) if whole is None else whole
            whole[..., entries] = part
        assert whole is not None
        return whole


class ScoringBackend:
    """What happens to attention on its way to a choice, and where: everything stays where it is.

    Three steps, and each may lie elsewhere in another kind of scoring backend: logits become
        attention,
    attention becomes scores that entries are chosen by, and what was chosen goes back.

    Attributes:
        frugal: whether the device's memory counts for more than its time.
    """

    frugal = False

    def place(self, device: "torch.device") -> "torch.device":
        """Where attention to what lies on a device is."""
        return device

    def attention(self, blocks: Iterable[Logits]) -> Iterator[Tensor]:
        """The softmax of each block, in order, `(batch, heads per KV head, rows, entries)`."""
        for block in blocks:
            yield block.whole().softmax(-1)

    def beside(self, tensor: Tensor) -> Tensor:
        """Something of the device's, where attention is."""
        return tensor

    def scores(self, scores: Tensor) -> Tensor:
        """What was made of attention, where it is pooled, compared and sorted."""
        return scores

    def slots(self, slots: Tensor) -> Tensor:
        """What was chosen by scores, back on the device."""
        return slots

    def timed(self) -> AbstractContextManager[None]:
        """Enter this wherever a method looks at attention to choose."""
        return nullcontext()


ON_DEVICE = ScoringBackend()
