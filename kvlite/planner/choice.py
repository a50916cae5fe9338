"""How a model may be loaded and used: settings, with those left open filled in."""

from dataclasses import dataclass, replace

from kvlite.methods.engine_config import EngineConfig
from kvlite.model.weights import Weights


@dataclass(frozen=True)
class Choice:
    """Settings as a plan decided them.

    Attributes:
        budget, kv_bits: as a user writes them.
        given: with this budget and these bits, parsed; its settings are those of the user.
    """

    weights: Weights
    stream: str
    budget: str
    kv_bits: str
    chunk: int
    given: EngineConfig

    @property
    def config(self) -> EngineConfig:
        """With settings that say what was decided."""
        settings = self.given.settings
        weights = settings.weights if self.weights.stored else self.weights.name
        decided = {
            "weights": weights,
            "stream": self.stream,
            "budget": self.budget,
            "kv_bits": self.kv_bits,
            "chunk": self.chunk,
        }
        return replace(self.given, settings=settings.replace(decided))
