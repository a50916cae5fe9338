"""What a turn keeps where memory is short: as much as its own forecast says there is room for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlite.cache import KVBits
from kvlite.config.units import readable
from kvlite.conversation.run_stats import planned_phases, wanted_bytes
from kvlite.memory.device_budget import ERROR, margin, spare_bytes
from kvlite.planner.ceiling import what_fits

if TYPE_CHECKING:
    from kvlite.conversation.turn import Turn


@dataclass(frozen=True)
class TurnPlan:
    """What a turn was planned to keep, and the peaks of its phases, in bytes."""

    budget: int
    bits: KVBits | None
    phases: dict[str, int]


def keep_what_fits(turn: "Turn") -> None:
    """Plan a turn. What is auto follows from the memory that there is now: everything is kept if it
    fits, in 8 bits if it then fits, or else as many entries as do."""
    everything, stats, spare = turn.everything, turn.run_stats, spare_for(turn)
    lacking: dict[tuple[int, KVBits | None], int] = {}

    def missing(budget: int, bits: KVBits | None) -> int:
        turn.keep(budget, everything.bits if bits is None else bits)
        stats.planned_phases = planned_phases(turn)
        wanted = wanted_bytes(turn)
        turn.wanted = max(turn.wanted, wanted)
        lacking[budget, bits] = found = wanted - spare
        return found

    if turn.settings.never_lossy:
        missing(everything.budget, everything.bits)
        return
    least = everything.least if everything.method.compresses else everything.budget
    kept = what_fits(missing, everything.budget, least, may_round=everything.may_round)
    if next(reversed(lacking)) != kept:
        missing(*kept)
    if kept != (everything.budget, None):
        turn.notes = (*turn.notes, _account(turn, lacking[everything.budget, None], *kept))


def spare_for(turn: "Turn") -> int:
    """Bytes of the device that a turn may take beside what there is now."""
    model, capped = turn.model, turn.run_stats.meter.capped
    if capped is not None and capped.cap is not None:
        return capped.free(model.device) - int(ERROR * capped.cap)
    left_free = margin() if model.device.type == "cuda" else 0
    return spare_bytes(model.all_devices) - left_free * len(model.all_devices)


def _account(turn: "Turn", missing: int, budget: int, bits: KVBits | None) -> str:
    if bits is not None:
        what = "the cache has 8 bits a number"
    else:
        rest = "forgotten" if turn.store is None else "recalled"
        seen = turn.turn_config.seen
        what = f"{budget:,} of {seen:,} entries a KV head are kept, the rest is {rest}"
    return f"{readable(max(missing, 0))} are lacking to keep everything: {what}"
