"""The longest text that fits, for each kind of weights, method and bits."""

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlite.cache.bits import AUTO, saving
from kvlite.config.settings import Settings
from kvlite.methods.budget import AUTO_LEAST, AUTO_SHARE
from kvlite.planner.choice import Choice
from kvlite.planner.plan import Plan
from kvlite.planner.planner import CHUNKS, Planner

FULL = "full"


@dataclass(frozen=True)
class MaxContext:
    """One combination of settings.

    Attributes:
        tokens: the longest prompt that fits, 0 if none does.
        all_of_it: whether this is the model's whole context.
    """

    weights: str
    method: str
    kv_bits: str
    tokens: int
    all_of_it: bool

    @property
    def shown(self) -> str:
        """As a table cell."""
        if not self.tokens:
            return "does not fit"
        return f"{self.tokens:,} tokens" + (", all the model holds" if self.all_of_it else "")

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def reaches(planner: Planner) -> list[MaxContext]:
    """The longest text for each of the planner's weights and bits, with `full` and with its own
    method, in its usual chunks, without streaming."""
    settings = planner.settings
    methods = [FULL] if settings.method == FULL else [FULL, settings.method]
    rows = []
    for method in methods:
        config = planner.config.changed(replace(settings, method=method))
        others = Planner(
            planner.forecaster, planner.room, config, planner.load_options, cancel=planner.cancel
        )
        bits = {settings.kv_bits: config.kv_bits}
        if settings.kv_bits == AUTO:
            bits = saving(("16", "8", "4"), planner.shape.kv_sizes)
        for weights in dict.fromkeys(weights for _, weights in planner.load_options):
            for width, packed in bits.items():
                given, chunk = replace(config, kv_bits=packed), settings.chunk or CHUNKS[0]
                choice = Choice(weights, "off", width, chunk, given)
                tokens = reach(others, choice)
                whole = tokens >= planner.shape.max_context - settings.planned_tokens
                name = "the default" if config.method.spec == Settings.method else method
                rows.append(MaxContext(weights.name, name, width, tokens, whole))
    return rows


def reach(planner: Planner, choice: Choice) -> int:
    """The most tokens that fit with a choice, or 0; with `auto`, if no more is kept than it must.

    Each phase grows linearly between bends (`_bends`), so forecasts of the longest text, and of
    shorter ones until one fits, determine all others. If windows are chunks, the line is that of
    texts that almost fill their last chunk; others take less.
    """
    choice = replace(choice, given=replace(choice.given, budget=planner.floor))
    held = planner.held.on_device(choice.weights, choice.stream)
    beside = planner.held.passing(choice.weights)
    if sum(held.values()) + beside > planner.room.tensors:
        return 0
    above: Plan | None = None
    bends = _bends(planner, choice)
    chunked = any(window is not None and window.chunked for window in planner.shape.windows)
    for length in reversed(bends):
        made = planner.plan(choice, length)
        if not made.fits:
            if length < bends[-1] or not chunked:
                above = made
            continue
        if above is None:
            return length
        if made.cards:
            return _reach_over_cards(planner, made, above)
        between = zip(made.needs, above.needs, strict=True)
        return length + min(
            _share(offered, low, high, above.tokens - length)
            for (low, offered), (high, _) in between
        )
    return 0


def _reach_over_cards(planner: Planner, below: Plan, above: Plan) -> int:
    """The most tokens that fit, between a plan that does and one that does not. What each layer
    takes grows in a straight line, not what each card does: layers move."""
    (kv, work), (more, most) = below.forecast.by_layer, above.forecast.by_layer

    def too_long(tokens: int) -> bool:
        share = (tokens - below.tokens) / (above.tokens - below.tokens)
        held = [int(low + share * (high - low)) for low, high in zip(kv, more, strict=True)]
        beside = int(work + share * (most - work))
        cards = planner.over_cards(below.choice, below.weights, held, beside)
        return any(card.free < 0 for card in cards)

    lengths = range(below.tokens, above.tokens)
    return lengths[bisect_left(lengths, True, key=too_long) - 1]


def _bends(planner: Planner, choice: Choice) -> list[int]:
    """Lengths between which every phase grows in a straight line, ascending; the last is the
    longest there may be."""
    most = planner.shape.max_context - planner.settings.planned_tokens
    grows = planner.floor != planner.config.budget and planner.method.compresses
    windows = {window for window in planner.shape.windows if window is not None}
    bends = {1, choice.chunk, choice.given.budget.entries}
    bends = bends.union(*(window.bends(most) for window in windows))
    bends |= {AUTO_LEAST, int(AUTO_LEAST / AUTO_SHARE)} if grows else set()
    return [*sorted(n for n in bends if n and n < most), *([most] if most > 0 else [])]


def _share(offered: int, low: int, high: int, tokens: int) -> int:
    """How many of so many tokens, which take a phase from `low` to `high`, are offered."""
    return tokens if high <= offered else int(tokens * (offered - low) / (high - low))
