"""How keys and values are quantized: one file a form. Forms are known without torch."""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlite.cache.quantization.vectors import QuantizedVectors


@dataclass(frozen=True)
class Form:
    """A form of quantization, as settings and plans know it.

    Attributes:
        place: the module in this package, and the class of its vectors there.
        widths: the bits that there may be.
        group: numbers that share a scale, unless a user asks for others.
        together: whether as many neighboring vectors as a group has numbers are quantized together;
            then single ones cannot be dropped or replaced.
        has_kernels: whether compiled loops and Triton's kernels read them; else torch's functions
            do, a part at a time.
        values: the form of values where keys have this one, by its key in `FORMS`; the same if
            None.
    """

    place: str
    widths: tuple[int, ...] = (2, 4, 8)
    group: int = 64
    together: bool = False
    has_kernels: bool = False
    values: str | None = None

    @cached_property
    def vectors(self) -> "type[QuantizedVectors]":
        """The class of its vectors."""
        module, name = self.place.split(".")
        found: type[QuantizedVectors] = getattr(import_module(f"{__name__}.{module}"), name)
        return found


FORMS: dict[str, Form] = {
    "": Form("hadamard.Hadamard", has_kernels=True),
    "kivi": Form("by_channel.ByChannel", group=32, together=True, values=""),
}
"""Forms by what a user writes before the bits."""
