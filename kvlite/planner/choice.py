"""How a model may be loaded and used: settings, with those left open filled in."""

from dataclasses import dataclass, replace

from kvlite.cache.bits import parse_kv_bits
from kvlite.methods.budget import parse_budget
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.weights import Weights


@dataclass(frozen=True)
class Choice:
    """Settings as a plan decided them.

    Attributes:
        budget, kv_bits: as a user writes them; of `auto`, what a first turn comes to.
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
        """With settings that say what was decided. How much is kept is decided by each turn."""
        settings = self.given.settings
        weights = settings.weights if self.weights.stored else self.weights.name
        decided = {"weights": weights, "stream": self.stream, "chunk": self.chunk}
        budget, bits = parse_budget(settings.budget), parse_kv_bits(settings.kv_bits)
        made = settings.replace(decided)
        return replace(self.given, settings=made, budget=budget, kv_bits=bits)
