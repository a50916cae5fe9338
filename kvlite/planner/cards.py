"""Which layers go on which of several cards: each card is filled to the same share, by the bytes
of the layers' weights and cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from typing import Any

from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.memory.device_budget import DeviceBudget
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.architectures import UNTESTED, architecture
from kvlite.model.shape import ModelShape
from kvlite.model.weights import Weights


@dataclass(frozen=True)
class CardPlan:
    """One card's part of a plan, in bytes.

    Attributes:
        layers: how many layers, following those of the card before.
        weights: of these layers; on the first card also everything that is not a layer.
        kv: the layers' cache and recall indexes, at their largest.
        work: the peak of everything else: hidden states, one layer with everything it has read,
            activations.
        passing: copies that exist while weights are loaded, before there is a cache.
        offered: what the card has for tensors.
    """

    name: str
    layers: int
    weights: int
    kv: int
    work: int
    passing: int
    offered: int

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.weights + max(self.kv + self.work, self.passing)

    @property
    def free(self) -> int:
        """Bytes that are left; below zero if it does not fit."""
        return self.offered - self.peak

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return {**asdict(self), "free": self.free}


def split(layers: Sequence[int], first: int, work: int, offered: Sequence[int]) -> tuple[int, ...]:
    """How many layers, in order, each card gets, so that the fullest card is as empty as possible.

    Args:
        layers: bytes of each layer.
        first: additional bytes on the first card.
        work: additional bytes on every card.
        offered: bytes of each card.
    """
    ends = [0]
    for size in layers:
        ends.append(ends[-1] + size)

    @cache
    def best(card: int, begin: int) -> tuple[float, tuple[int, ...]]:
        if card == len(offered):
            return (0.0 if begin == len(layers) else inf), ()
        found = []
        for end in range(begin, len(layers) + 1):
            held = ends[end] - ends[begin] + work + (0 if card else first)
            rest, counts = best(card + 1, end)
            found.append((max(held / max(1, offered[card]), rest), (end - begin, *counts)))
        return min(found)

    return best(0, 0)[1]


def over_cards(
    rooms: Sequence[DeviceBudget],
    weights: Sequence[int],
    kv: Sequence[int],
    first: int,
    work: int,
    passing: int,
) -> tuple[CardPlan, ...]:
    """What each card takes, in bytes.

    Args:
        weights, kv: of each layer.
        first: additional bytes on the first card.
        work, passing: as in `CardPlan`, for every card.
    """
    sizes, offered = list(map(sum, zip(weights, kv, strict=True))), [each.tensors for each in rooms]
    made, begin = list[CardPlan](), 0
    for room, count in zip(rooms, split(sizes, first, work, offered), strict=True):
        own = slice(begin, begin + count)
        begin, held = own.stop, sum(weights[own]) + (0 if made else first)
        made.append(CardPlan(room.name, count, held, sum(kv[own]), work, passing, room.tensors))
    return tuple(made)


def require_cards(config: EngineConfig, shape: ModelShape, count: int) -> None:
    """Check, before anything is read, that a model's layers can go on several cards.

    Raises:
        SettingError: the model or a setting needs all layers on one.
    """
    settings = config.settings
    named, model = f"--device {settings.device}", settings.model
    if count > shape.layers:
        raise SettingError(
            f"{named} names {count} cards for the {shape.layers} layers of {model}: name fewer"
        )
    if architecture(shape.model_type) is UNTESTED:
        raise SettingError(
            f"{named}: {model} is a {shape.model_type!r} model, which kvlite was not tested with "
            "and cannot check over several cards: name one"
        )
    if shape.lenders:
        raise SettingError(
            f"{named}: the last layers of {model} attend to what others hold, and have to be on "
            "the same card: name one"
        )
    if settings.stream not in ("auto", "off"):
        raise SettingError(f"--stream {settings.stream} is for one card: name one in --device")
    require_on_cards(config)


def layable(
    load_options: Sequence[tuple[str, Weights]], shape: ModelShape, settings: Settings
) -> list[tuple[str, Weights]]:
    """The weight formats that can be read layer by layer.

    Raises:
        SettingError: nothing can.
    """
    found = [
        (stream, weights)
        for stream, weights in load_options
        if not weights.stored or weights.keeps_experts_packed(shape.model_type)
    ]
    if not found:
        raise SettingError(
            f"--device {settings.device}: the weights of {settings.model} are "
            f"{load_options[0][1].name} already, which cannot be read layer by layer: name the "
            "model they were made from, or one card"
        )
    return found


def require_on_cards(config: EngineConfig) -> None:
    """Raise SettingError if a setting needs all layers on one card."""
    settings = config.settings
    if settings.scores != "device":
        raise SettingError(f"--scores {settings.scores} is for one card: name one in --device")
    if config.method.across.merging is not None:
        raise SettingError(
            f"--method {settings.method} merges layers, which may be on two cards: name one in "
            "--device"
        )
