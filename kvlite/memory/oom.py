"""Out of memory: what is given up, in which order, so that the same answer goes on.

Work is done in parts that can be retried. A part that runs out of memory is first retried after
releasing unused memory, then after giving up one thing at a time. Steps that cost quality can be
forbidden.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from kvlite.errors import OutOfMemory
from kvlite.memory.free import free_bytes, is_oom, release_memory, with_free

T = TypeVar("T")

OOMActions = dict[str, Callable[[], bool]]
"""What a part of the work can give up, by the step's name: a function that gives it up, and returns
whether it could. It may be called more than once."""

Tell = Callable[[str], None]


class Safely(Protocol):
    """Does a part of the work that can be retried."""

    def __call__(self, work: Callable[[], T]) -> T:
        """The result of the work."""


def at_once(work: Callable[[], T]) -> T:
    """Do the work without retries."""
    return work()


def unless_short(device: torch.device, work: Callable[[], T]) -> T | None:
    """The result of work that can be done again; None if memory ran out, and the work's is free."""
    try:
        return work()
    except Exception as error:
        if not is_oom(error):
            raise
    # The error is gone here, and with its traceback what the work had made.
    release_memory(device)
    return None


def alone() -> bool:
    """As `waits` where there are no others."""
    return False


@dataclass(frozen=True)
class OOMStep:
    """Something that can be given up.

    Attributes:
        name: as in metrics.
        said: the message to the user.
        lossy: whether answers may get worse.
    """

    name: str
    said: str
    lossy: bool = False


OOM_STEPS = (
    OOMStep("smaller chunk", "it goes on in chunks half as long, which takes a little longer"),
    OOMStep("hidden states in RAM", "what goes from layer to layer waits in host memory"),
    OOMStep(
        "8-bit cache", "the cache is rounded to 8 bits, which costs next to nothing", lossy=True
    ),
    OOMStep("4-bit cache", "the cache is rounded to 4 bits", lossy=True),
    OOMStep(
        "smaller budget",
        "the cache keeps half of its budget; with recall the next turn still reads everything",
        lossy=True,
    ),
    OOMStep("streamed weights", "layers' weights wait in host memory, which makes answers slow"),
)
(CHUNK, HIDDEN, EIGHT_BITS, FOUR_BITS, BUDGET, STREAM) = (oom_step.name for oom_step in OOM_STEPS)


class OOMPolicy:
    """What one conversation has given up so far. It stays given up in later turns.

    Attributes:
        never_lossy: stop instead of taking a step that costs quality.
        waits: returns whether nothing is given up, as others will end and leave their memory.
        tell: called with a sentence when something is given up.
        allowed: names of the steps that may be taken.
        taken: names of the steps, in order; a step can come several times.
        free: returns the bytes that are available on a device now.
    """

    def __init__(
        self,
        device: torch.device,
        cards: Sequence[torch.device] = (),
        *,
        never_lossy: bool = False,
    ) -> None:
        """For work on a device, or on several `cards`."""
        self.device, self.devices = device, [*dict.fromkeys((device, *cards))]
        self.never_lossy = never_lossy
        self.waits: Callable[[], bool] = alone
        self.tell: Tell = lambda said: None
        self.allowed: Collection[str] = [oom_step.name for oom_step in OOM_STEPS]
        self.taken: list[str] = []
        self.free = free_bytes

    def run(self, work: Callable[[], T], oom_actions: OOMActions) -> T:
        """Do a part of the work, and retry it while memory runs out.

        Args:
            work: must allocate everything that it needs before its first lasting change.
            oom_actions: the steps that are possible here.

        Raises:
            OutOfMemory: no step is left, or none that is allowed.
        """
        tries = 0
        while True:
            done = unless_short(self.device, lambda: [work()])
            if done is not None:
                return done[0]
            tries += 1
            if tries > 1 and not self._gave_up(oom_actions, lossless=self.never_lossy):
                raise OutOfMemory(self._exhausted(oom_actions))

    def reserve_for(
        self,
        storage: int,
        workspace: Callable[[], int],
        oom_actions: OOMActions,
        device: torch.device | None = None,
    ) -> None:
        """Before a large step: give up what costs no quality until there is enough memory, or
        nothing is left to give up. A forecast may be too high, so quality is not given up for it.

        Args:
            storage: bytes it will hold; if fewer are free, giving up anything would be in vain.
            workspace: returns the bytes it needs besides.
            device: where it needs them, if not on the first.
        """
        device = device or self.device
        while storage <= self.free(device) < storage + workspace():
            if not self._gave_up(oom_actions, lossless=True):
                return

    def times(self, name: str) -> int:
        """How often a step was taken."""
        return self.taken.count(name)

    def _gave_up(self, oom_actions: OOMActions, *, lossless: bool) -> bool:
        for oom_step in () if self.waits() else self._possible(oom_actions):
            if lossless and oom_step.lossy:
                continue
            with torch.inference_mode():  # memory that runs out meanwhile counts as no
                gave = unless_short(self.device, oom_actions[oom_step.name])
            if gave:
                self.taken.append(oom_step.name)
                self.tell(f"memory is short: {oom_step.said} ({oom_step.name})")
                return True
        return False

    def _possible(self, oom_actions: OOMActions) -> list[OOMStep]:
        named = [oom_step for oom_step in OOM_STEPS if oom_step.name in oom_actions]
        return [oom_step for oom_step in named if oom_step.name in self.allowed]

    def _exhausted(self, oom_actions: OOMActions) -> str:
        lossy = any(oom_step.lossy for oom_step in self._possible(oom_actions))
        gone = f" after giving up {', '.join(dict.fromkeys(self.taken))}" if self.taken else ""
        remedy = (
            "leave --never-lossy out to let the cache be rounded or cut"
            if lossy and self.never_lossy
            else "close other programs, ask about less at once, or use a smaller model"
        )
        where = with_free(self.devices, self.free)
        return f"out of memory on {where}{gone}; the conversation is kept and can go on: {remedy}"
