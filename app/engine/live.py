"""What the machine holds now, looked up once a second while somebody looks."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlite.planner.usage import Place, host, places

from .figures import Figures
from .model_host import ModelHost

# Seconds between two looks, and how many are remembered: five minutes.
BEAT, KEPT = 1.0, 300


@dataclass(frozen=True)
class Sample:
    """One look.

    Attributes:
        at: by `time.monotonic`.
        places: memory, the device's first.
        mine: bytes of the device that kvlite holds.
        figures: None while no conversation is in memory.
        opening: whose conversation is being brought back to memory, None if none is.
        title: of the one that is in memory.
        model: its name; "" while there is none.
    """

    at: float
    places: Sequence[Place]
    mine: int
    figures: Figures | None
    opening: str | None = None
    title: str = ""
    model: str = ""


class Live:
    """Looks, at most once a second however many ask.

    Attributes:
        samples: the last minutes', the oldest first.
    """

    def __init__(self, model_host: ModelHost, clock: Callable[[], float] = time.monotonic) -> None:
        self.model_host = model_host
        self.clock = clock
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def look(self) -> list[Sample]:
        """The last minutes, up to now."""
        with self._lock:
            now = self.clock()
            if not self.samples or now - self.samples[-1].at >= 0.9 * BEAT:
                self.samples.append(self._sample(now))
            return [*self.samples]

    def _sample(self, now: float) -> Sample:
        runner, open_now = self.model_host.runner, self.model_host.active
        if runner is None:
            return Sample(now, [host(())], 0, None)
        figures = None if open_now is None else open_now.figures
        held = self.model_host.holding if figures is None else figures.holding
        found = places(runner.model.device, held, runner.settings.vram)
        mine = sum(part.nbytes for part in found[0].parts if part.mine)
        opening = open_now.store.owner if open_now is not None and figures is None else None
        title = "" if open_now is None else open_now.record.title
        model = Path(runner.settings.model).name
        return Sample(now, found, mine, figures, opening, title, model)
