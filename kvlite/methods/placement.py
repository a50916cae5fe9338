"""Where entries are scored and chosen. By default everything stays on the device."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlite.methods.types import Tensor
from kvlite.ops.softmax import Softmax

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Logits:
    """A block of rows over one head's entries, computed a part of the entries at a time.

    Attributes:
        shape: `(batch, heads per KV head, rows, entries)`.
        parts: which entries, and their logits `(batch, heads per KV head, rows, n)` float32 on the
            device; computed lazily, and only once.
        softmax: of these query heads.
    """

    shape: tuple[int, ...]
    parts: Iterator[tuple[slice, Tensor]]
    softmax: Softmax

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
    """What happens to attention on its way to a choice: logits become attention, attention becomes
    scores, and the chosen slots go back. Here everything stays on the device; subclasses move steps
    to the host.

    Attributes:
        frugal: whether the device's memory matters more than its time.
    """

    frugal = False

    def place(self, device: "torch.device") -> "torch.device":
        """Where attention to entries on this device is."""
        return device

    def attention(self, blocks: Iterable[Logits]) -> Iterator[Tensor]:
        """The softmax of each block, in order, `(batch, heads per KV head, rows, entries)`."""
        for block in blocks:
            yield block.softmax.probabilities(block.whole())

    def to_scoring_device(self, tensor: Tensor) -> Tensor:
        """A tensor from the device, moved to where attention is."""
        return tensor

    def scores(self, scores: Tensor) -> Tensor:
        """Scores, moved to where they are pooled, compared and sorted."""
        return scores

    def slots(self, slots: Tensor) -> Tensor:
        """Chosen slots, moved back to the device."""
        return slots

    def timed(self) -> AbstractContextManager[None]:
        """Enter this wherever a method chooses by attention."""
        return nullcontext()


ON_DEVICE = ScoringBackend()
