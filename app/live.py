"""What the machine holds now, looked up once a second while somebody looks."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlite.memory.where import Place, host, places
from kvlite.model.shape import ModelShape

from .opened import Open
from .service import Service

# Seconds between two looks, and how many are remembered: five minutes.
BEAT, KEPT = 1.0, 300


@dataclass(frozen=True)
class Talking:
    """Of the conversation in memory.

    Attributes:
        owner, id: whose, and which.
        seen, most: tokens it has, and those the model was trained for.
        kv_bytes, full_kv_bytes: of its cache, and if nothing were dropped.
        tier_bytes: host memory that everything is kept in, to be recalled.
        first_token_s, tokens_per_s: of the answer that comes, or came last.
        rungs: what was given up so far because memory was short.
    """

    owner: str
    id: str
    seen: int
    most: int
    kv_bytes: int
    full_kv_bytes: int
    tier_bytes: int
    first_token_s: float | None
    tokens_per_s: float | None
    rungs: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One look.

    Attributes:
        at: by `time.monotonic`.
        places: memory, the device's first.
        mine: bytes of the device that kvlite holds.
        talking: None while no conversation is in memory.
    """

    at: float
    places: Sequence[Place]
    mine: int
    talking: Talking | None


class Live:
    """Looks, at most once a second however many ask.

    Attributes:
        samples: the last minutes', the oldest first.
    """

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
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
        runner, open_now = self.service.runner, self.service.open
        if runner is None:
            return Sample(now, [host(())], 0, None)
        talk = None if open_now is None else open_now.talk
        found = places(
            runner.model,
            None if talk is None else talk.cache,
            None if talk is None else talk.tier,
            0 if talk is None else talk.checkpoint_bytes,
            runner.settings.vram,
        )
        mine = sum(part.nbytes for part in found[0].parts if part.mine)
        talking = None if open_now is None else _talking(open_now, runner.shape)
        return Sample(now, found, mine, talking)


def _talking(now: Open, shape: ModelShape) -> Talking:
    talk, last = now.talk, now.session.last
    cache, tier = talk.cache, talk.tier
    itemsize = talk.model.dtype.itemsize
    return Talking(
        owner=now.owner,
        id=now.record.id,
        seen=cache.seen,
        most=shape.max_context,
        kv_bytes=cache.nbytes,
        full_kv_bytes=shape.full_kv_bytes(cache.seen, itemsize),
        tier_bytes=0 if tier is None or not tier.begun else tier.nbytes,
        first_token_s=None if last is None else last.time_to_first_token_s,
        tokens_per_s=None if last is None else last.decode_tokens_per_s,
        rungs=tuple(talk.ladder.taken),
    )
