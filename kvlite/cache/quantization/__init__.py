"""How keys and values are quantized: one file a form."""

from kvlite.cache.quantization.by_channel import ByChannel
from kvlite.cache.quantization.hadamard import Hadamard
from kvlite.cache.quantization.vectors import QuantizedVectors

__all__ = ["FORMS", "ByChannel", "Hadamard", "QuantizedVectors"]

FORMS: dict[str, type[QuantizedVectors]] = {
    "": Hadamard,
    "kivi": ByChannel,
}
"""Forms by what a user writes before the bits."""
