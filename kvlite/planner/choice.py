"""How a model may be loaded and used: settings, with those left open filled in."""

from dataclasses import dataclass, replace

from kvlite.methods.engine_config import EngineConfig
from kvlite.model.weights import Weights


@dataclass(frozen=True)
class Choice:
    """Settings as a plan decided them.

    Attributes:
        kv_bits: as a user writes them; of `auto`, what a first turn comes to.
        given: with the budget of a first turn and these bits; its settings are those of the user.
    """

    weights: Weights
    stream: str
    kv_bits: str
    chunk: int
    given: EngineConfig

    @property
    def budget(self) -> str:
        """The budget as the user wrote it."""
        return self.given.settings.budget

    def decided(self, config: EngineConfig) -> EngineConfig:
        """The user's config, with settings that say what was decided. How much is kept is decided
        by each turn."""
        settings = config.settings
        weights = settings.weights if self.weights.stored else self.weights.name
        decided = {"weights": weights, "stream": self.stream, "chunk": self.chunk}
        return replace(config, settings=settings.replace(decided))
