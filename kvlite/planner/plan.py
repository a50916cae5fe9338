"""A plan: what will fit, and why, before any weights are read."""

from dataclasses import dataclass, replace
from typing import Any

from kvlite.cache.bits import written
from kvlite.config.units import readable
from kvlite.errors import SettingError
from kvlite.memory.device_budget import DeviceBudget
from kvlite.offload.weights.experts import LEAST, Resident
from kvlite.planner.cards import CardPlan
from kvlite.planner.choice import Choice
from kvlite.planner.peaks import Forecast, Moment


@dataclass(frozen=True)
class Plan:
    """The memory that reading and answering will take.

    Attributes:
        room: what the device offers.
        choice: the settings to run with.
        tokens, longest: tokens to read, and of the answer that is planned for.
        kept: of these, entries that a KV head keeps, on the mean, if the method keeps to a budget.
        weights: bytes by group, while the model runs.
        passing: bytes of the largest weight, which exists twice while it is loaded.
        forecast: of everything else.
        reasons: for each setting that was left open, a sentence why it was chosen.
        tokens_per_s: the limit set by the memory's bandwidth; None if it is unknown.
        mtp: bytes of the model's own MTP head, if it is to be loaded.
        resident: the part of streamed layers that stays on the device.
        cards: the plan of each card, if there are several.
    """

    model: str
    room: DeviceBudget
    choice: Choice
    tokens: int
    longest: int
    kept: int
    weights: dict[str, int]
    passing: int
    forecast: Forecast
    reasons: tuple[str, ...]
    tokens_per_s: float | None
    mtp: int = 0
    resident: Resident = LEAST
    cards: tuple[CardPlan, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on the device."""
        return sum(self.weights.values())

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """Bytes at the peak of each phase, item by item."""
        made = self.forecast
        beside = {"MTP head": self.mtp} if self.mtp else {}
        return {
            "load": {"weights": self.weight_bytes, "a weight on its way": self.passing, **beside},
            "read": self._items(made.reading) | beside,
            "choose": self._items(made.choosing) | beside,
            "answer": self._items(made.answering) | beside,
        }

    def _items(self, moment: Moment) -> dict[str, int]:
        return {
            "weights": self.weight_bytes,
            "KV cache": moment.kv,
            "hidden states": moment.hidden,
            "one layer's KV": moment.layer,
            "activations and scores": moment.work,
        }

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors in the largest phase; with several cards, the sum of their peaks."""
        if self.cards:
            return sum(card.peak for card in self.cards)
        return max(sum(items.values()) for items in self.phases.values())

    @property
    def needs(self) -> list[tuple[int, int]]:
        """Bytes of each phase, or of each card, and the bytes available for them."""
        if self.cards:
            return [(card.peak, card.offered) for card in self.cards]
        return [(sum(items.values()), self.room.tensors) for items in self.phases.values()]

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return all(need <= offered for need, offered in self.needs)

    @property
    def changes(self) -> tuple[str, ...]:
        """The reasons, if anything was given up for lack of memory."""
        return self.reasons if len(self.reasons) > 1 else ()

    def without_mtp(self, nbytes: int) -> "Plan":
        """The same plan without the model's own MTP head, which does not fit."""
        made = replace(self, mtp=0)
        said = f"the model's own MTP head is left out: there is no room for its {readable(nbytes)}"
        before = self.changes or (
            f"all else fits: {readable(made.peak_bytes)} of {self.room.offered}",
        )
        return replace(made, reasons=(*before, said))

    def to_json(self) -> dict[str, Any]:
        """Plain values by name; bytes."""
        return {
            "model": self.model,
            "device": self.room.name,
            "device_bytes": self.room.total,
            "context_bytes": self.room.context,
            "desktop_bytes": self.room.desktop,
            "margin_bytes": self.room.margin,
            "tensor_bytes": self.room.tensors,
            "weights": self.choice.weights.name,
            "stream": self.choice.stream,
            "budget": self.choice.budget,
            "kv_bits": self.choice.kv_bits,
            "chunk": self.choice.chunk,
            "tokens": self.tokens,
            "answer_tokens": self.longest,
            "kept_tokens": self.kept,
            "phases": self.phases,
            "cards": [card.to_json() for card in self.cards],
            "peak_bytes": self.peak_bytes,
            "kv_bytes": self.forecast.kv_bytes,
            "host_bytes": self.forecast.host_bytes,
            "host_free_bytes": self.room.host,
            "fits": self.fits,
            "tokens_per_s_at_most": self.tokens_per_s,
            "reasons": list(self.reasons),
        }


def refusal(plan: Plan) -> SettingError:
    """The message that refuses a plan that does not fit."""
    room, choice = plan.room, plan.choice
    peak, phase = max((sum(items.values()), name) for name, items in plan.phases.items())
    return SettingError(
        f"{plan.model} needs at least {readable(peak)} to {phase} ({plan.tokens:,} tokens, "
        f"{choice.weights.name} weights of {readable(plan.weight_bytes)}, a cache of "
        f"{written(choice.given.kv_bits)} bits), and {room.name} offers "
        f"{readable(room.tensors)}: use a smaller model, a shorter text, or more memory (--vram)"
    )
