"""The memory that a turn is planned to take, from its own cache, policies and host store."""

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from kvlite.cache.segment import bytes_held
from kvlite.errors import ForecastError
from kvlite.planner.forecast import Task, forecast
from kvlite.planner.meta import meta
from kvlite.planner.meta_model import meta_model_of
from kvlite.planner.peaks import Moment

if TYPE_CHECKING:
    from kvlite.conversation.turn import Turn


def planned_phases(turn: "Turn") -> dict[str, int]:
    """The planned peak of each phase, in bytes of live tensors; empty if unknown."""
    model = turn.model
    task = Task(
        new=len(turn.again) + len(turn.ids),
        longest=turn.turn_config.planned,
        known=len(turn.token_ids) - len(turn.again),
        chunk=turn.chunk,
        recalled=turn.settings.recall_entries,
    )
    store = None if turn.store is None else meta(replace(turn.store, transfers={}, disk=None))
    try:
        made = forecast(meta_model_of(model), meta(turn.cache), turn.policies, task, store)
    except ForecastError:
        return {}
    weights, cards = bytes_held(model.tensors()), len(model.all_devices)

    def peak(moment: Moment) -> int:
        """The sum of all cards' peaks: each card has its own layers, and works on them in turn."""
        return weights + moment.kv + cards * (moment.total - moment.kv)

    return {"read": max(map(peak, (made.reading, made.choosing))), "answer": peak(made.answering)}


def wanted_bytes(turn: "Turn") -> int:
    """Bytes of the device that a turn is planned to take beside what there is now."""
    index = [] if turn.store is None else turn.store.index_tensors
    held = bytes_held(chain(turn.model.tensors(), turn.cache.tensors, index))
    return max(0, (turn.run_stats.planned or 0) - held)
