"""The result of a forecast: the peaks of a turn, and what each consists of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """The parts of a peak, in bytes on the device, without weights.

    Attributes:
        kv: all layers' keys, values, positions and attention rows, and the recall indexes.
        hidden: hidden states of all tokens, their ids and rotations.
        layer: one layer with everything it has read.
        work: temporary tensors: a chunk's activations, scores, logits.
    """

    kv: int = 0
    hidden: int = 0
    layer: int = 0
    work: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.kv + self.hidden + self.layer + self.work

    @classmethod
    def over(cls, kv: int, hidden: int, whole: int, peak: int) -> "Moment":
        """A peak over what lived before a layer, which has `whole` bytes with all it read."""
        return cls(kv, hidden, min(whole, peak), max(0, peak - whole))

    def higher(self, other: "Moment") -> "Moment":
        """The higher one of two."""
        return max(self, other, key=lambda each: each.total)


@dataclass(frozen=True)
class Forecast:
    """The memory that a turn will take.

    Attributes:
        reading: the peak while a chunk passes through a layer.
        choosing: the peak while a layer is cut.
        answering: at the last token of the longest answer.
        kv_bytes: bytes of the cache after reading, including recall indexes.
        host_bytes: bytes of host memory or disk, for everything read and answered.
        layers: bytes of each layer's cache after the longest answer, including its recall index.
    """

    reading: Moment
    choosing: Moment
    answering: Moment
    kv_bytes: int
    host_bytes: int
    layers: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The highest peak, without weights."""
        return max(each.total for each in (self.reading, self.choosing, self.answering))

    @property
    def by_layer(self) -> tuple[list[int], int]:
        """The largest bytes of each layer's cache, and the peak of everything else."""
        moments = self.reading, self.choosing, self.answering
        more = max(1, max(each.kv for each in moments) / max(1, sum(self.layers)))
        return [int(more * each) for each in self.layers], max(m.total - m.kv for m in moments)
