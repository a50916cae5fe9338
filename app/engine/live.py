"""What the machine holds now, measured once a second while somebody looks."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlite.planner.usage import Place, host, places

from .active_conversation import Figures
from .model_host import ModelHost

# Seconds between two samples, and how many are remembered: five minutes.
BEAT, KEPT = 1.0, 300


@dataclass(frozen=True)
class Sample:
    """What was measured at one moment.

    Attributes:
        at: by `time.monotonic`.
        places: memory, the device's first.
        mine: bytes of the device that kvlite holds.
        figures: None while no conversation is in memory.
        opening: the owner of the conversation that is being opened, if one is.
    """

    at: float
    places: Sequence[Place]
    mine: int
    figures: Figures | None
    opening: str | None = None
    title: str = ""
    model: str = ""


class Live:
    """Takes samples, at most one a second however many users look."""

    def __init__(self, model_host: ModelHost) -> None:
        self.model_host = model_host
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def look(self) -> list[Sample]:
        """The samples of the last minutes, the newest last."""
        with self._lock:
            now = time.monotonic()
            if not self.samples or now - self.samples[-1].at >= 0.9 * BEAT:
                self.samples.append(self._sample(now))
            return [*self.samples]

    def _sample(self, now: float) -> Sample:
        runner, active = self.model_host.runner, self.model_host.active
        if runner is None:
            return Sample(now, [host(())], 0, None)
        model = Path(runner.settings.model).name
        figures = None if active is None else active.figures
        held = self.model_host.holding if figures is None else figures.holding
        found = places(runner.model.device, held, runner.settings.vram, runner.model.cards)
        mine = sum(part.nbytes for part in found[0].parts if part.mine)
        if active is None:
            return Sample(now, found, mine, None, model=model)
        opening = active.store.owner if figures is None else None
        return Sample(now, found, mine, figures, opening, active.record.title, model)
