"""The longest text that fits, for each kind of weights, method and bits."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlite.config.settings import Settings
from kvlite.methods.engine_config import EngineConfig
from kvlite.planner.plan import BITS, CHUNKS, Choice, Planner

FULL = "full"


@dataclass(frozen=True)
class MaxContext:
    """One combination of settings.

    Attributes:
        tokens: the longest prompt that fits, 0 if none does.
        all_of_it: whether that is the model's whole context.
    """

    weights: str
    method: str
    kv_bits: str
    tokens: int
    all_of_it: bool

    @property
    def shown(self) -> str:
        """For a table."""
        if not self.tokens:
            return "does not fit"
        return f"{self.tokens:,} tokens" + (", all the model holds" if self.all_of_it else "")

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def reaches(planner: Planner) -> list[MaxContext]:
    """All combinations of the weights the planner may choose from, with `full` and its own method,
    in its usual chunks; nothing is streamed."""
    settings = planner.settings
    methods = [FULL] if settings.method == FULL else [FULL, settings.method]
    rows = []
    for method in methods:
        config = EngineConfig.from_settings(replace(settings, method=method))
        others = Planner(
            planner.forecaster, planner.room, config, planner.load_options, cancel=planner.cancel
        )
        bits = BITS if settings.kv_bits == "auto" else (settings.kv_bits,)
        for weights in dict.fromkeys(weights for _, weights in planner.load_options):
            for width in bits:
                choice = Choice(weights, "off", settings.budget, width, settings.chunk or CHUNKS[0])
                tokens = others.reach(choice)
                whole = tokens >= planner.shape.max_context - settings.max_new_tokens
                name = "the default" if config.method.spec == Settings.method else method
                rows.append(MaxContext(weights.name, name, width, tokens, whole))
    return rows
