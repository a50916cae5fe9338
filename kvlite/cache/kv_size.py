"""The size of a token's entry in a layer's cache."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KVSize:
    """What a layer keeps of a token, by the model's config.

    Attributes:
        heads: KV heads, each with an entry.
        dim: channels of a key, and of a value.
        latent: an entry is one vector, its key and its value (MLA).
    """

    heads: int
    dim: int
    latent: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers an entry has."""
        return self.dim if self.latent else 2 * self.dim

    def entry_bytes(self, itemsize: int) -> int:
        """Bytes of one entry that is not quantized: its numbers and an int32 position."""
        return self.numbers * itemsize + 4
