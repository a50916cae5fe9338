"""Speculation: tokens that are likely to follow go through the layers together with the next one.

Entries of proposed tokens lie in free slots, which nothing reads. Each counts once its token is
drawn, from the same logits in the same order as without speculation. So nothing has to be rolled
back, wherever an answer ends, but for what rejected tokens recalled; their entries are overwritten
(`engine.step`).
"""

from collections import deque
from collections.abc import Callable, Collection, MutableSequence, Sequence
from functools import partial
from itertools import takewhile
from math import log2
from statistics import median
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache
from kvlite.engine.cuda_graph import GraphDecoder, graph_decoder
from kvlite.engine.runs_with import reason_against
from kvlite.engine.step import StepRows, step_alone
from kvlite.memory.oom import unless_short
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel
from kvlite.offload import Recall

T = TypeVar("T")
# The most tokens in one pass, and how much more tokens in the same time it has to promise.
WIDEST, WORTH = 8, 1.1
# What a second token and each further one cost a CPU (SmolLM2 in fp32), in steps of one token.
SECOND, FURTHER = 0.35, 0.1
# Times that are remembered of passes, and of single steps; and how many it takes to know anything.
REMEMBERED, FEWEST = 9, 3
# After so many single steps, another one is expected.
RESTS = 16


def room_ahead(
    cache: KVCache, policies: Sequence[LayerPolicy], recall: Recall | None = None
) -> int:
    """How many tokens layers take before one grows or is trimmed, if nothing is against several
    (`runs_with`)."""
    stores = [] if recall is None else recall.store.filled()
    return min([*map(_room, cache.layers, policies), *(layer.room for layer, _, _ in stores)])


def _room(layer: LayerCache, policy: LayerPolicy) -> int:
    rooms = [head_group.free for head_group in layer.head_groups]
    if policy.method.decoding.trim is not None:
        rooms += [policy.budget - used for _, used in layer.lengths]
    return min(rooms)


class Pace:
    """What a pass of several tokens costs, in steps of one.

    The cost of a second token and of each further one keep the ratio that a CPU has; how high both
    are is measured in this answer, to a power of 2, so that noise seldom decides.
    """

    def __init__(self) -> None:
        self._single: deque[float] = deque(maxlen=REMEMBERED)
        self._passes: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    def took(self, width: int, seconds: float) -> None:
        """A step of `width` tokens took so long."""
        if width == 1:
            self._single.append(seconds)
        else:
            self._passes.append((width, seconds))

    @property
    def factor(self) -> float:
        """How many times the costs of a CPU a pass costs, beyond its first token."""
        if min(len(self._single), len(self._passes)) < FEWEST:
            return 1
        one = median(self._single)
        factor = median((seconds / one - 1) / _more(width) for width, seconds in self._passes)
        return float(2 ** round(log2(min(max(factor, 1 / 16), 16))))

    def costs(self) -> list[float]:
        """The costs of passes of 1, 2, ... `WIDEST` tokens."""
        factor = self.factor
        return [1 + factor * _more(width) for width in range(1, WIDEST + 1)]


def _more(width: int) -> float:
    """What a pass costs a CPU beyond its first token."""
    return (SECOND + FURTHER * (width - 2)) if width > 1 else 0.0


class Proposer(Protocol):
    """Proposes tokens to come from those so far."""

    def push(self, token: int) -> None:
        """Go on with the next token, and count whether it was the one to be expected."""

    def chances(self, count: int) -> list[float]:
        """How likely the first, the first two, ... of `count` proposed tokens all come; none where
        nothing is proposed."""

    def proposed(self, count: int) -> list[int]:
        """The next `count` tokens."""

    def release(self) -> None:
        """Let go of what it holds on the device."""


class Speculation:
    """Decides, token by token, how many go through the layers together.

    It counts how often proposals would have been right, even before any is tried, and measures how
    long passes take. If proposals do not pay, it makes none.

    Attributes:
        off: why there are none for the rest of the answer; empty if there may be.
        reason: why there were none when they were last wanted; empty if there were.
        graphs: takes passes of several tokens, all of the same width, on CUDA.
        steps: passes through the layers so far, of one token or several.
        proposed, accepted: tokens that went through ahead, and those that then came.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        policies: MutableSequence[LayerPolicy],
        recall: Recall | None,
        proposers: Sequence[Proposer],
        ends: Collection[int],
        off: str = "",
    ) -> None:
        """For one answer; after one of `ends` nothing is proposed. Of several proposers the one
        that promises most is asked. Cache and policies may change meanwhile."""
        self.model, self.cache, self.policies, self.recall = model, cache, policies, recall
        self.ends, self.off, self.reason = ends, off, ""
        self.proposers = proposers
        self.pace = Pace()
        self.steps = self.proposed = self.accepted = 0
        self.graphs = graph_decoder(model)
        self._ahead: StepRows | None = None
        self._width, self._spent, self._began = 1, 0.0, 0.0
        self._single = 0

    @property
    def resting(self) -> bool:
        """Whether the next step is one of a single token, as far as one can tell."""
        return bool(self.off) or self._single >= RESTS

    def enter(self, token: int, most: int) -> Tensor | None:
        """Let a token that was drawn be in the cache, if that takes no step of its own.

        Args:
            most: tokens still to be drawn, at most.

        Returns:
            Logits of the next token, `(1, vocab)` float32; None if it takes a step.
        """
        began, self._began = self._began, perf_counter()
        if not self.off:
            for proposer in self.proposers:
                proposer.push(token)
        if self._ahead is not None and self._ahead.entered < self._width:
            logits = self._unless_short(partial(self._ahead.accept, token))
            if logits is not None:
                self.accepted += 1
                return logits
        self.leave()
        if began:
            self.pace.took(self._width, self._spent)
        proposed = self._proposed(most)
        token_ids = [token, *takewhile(lambda each: each not in self.ends, proposed)]
        self._width, self._spent = len(token_ids), 0.0
        self.steps += 1
        self._single = self._single + 1 if self._width == 1 else 0
        return None if self._width == 1 else self._unless_short(partial(self._pass, token_ids))

    def release(self) -> None:
        """Let go of the layers that tokens went through; the answer has ended."""
        self.leave()
        if self.graphs is not None:
            self.graphs.release()
        for proposer in self.proposers:
            proposer.release()

    def joins(self) -> None:
        """Count the step with other conversations that comes, which take one token each: nothing is
        proposed from here on."""
        self.steps += 1
        self.off = self.off or "answers that come together take single steps"
        self.leave()

    def leave(self) -> None:
        """Let go of tokens that went ahead and did not come."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.leave()

    def drawn(self) -> None:
        """A token was drawn, so that the device is done."""
        if self._began:
            self._spent += perf_counter() - self._began

    def _proposed(self, most: int) -> list[int]:
        """The tokens that are put through now behind the next: as many as promise the most tokens
        in a time."""
        if self.off:
            return []
        best, chosen, rate, costs = 0, None, WORTH, self.pace.costs()
        for proposer in self.proposers:
            tokens = 1.0
            for ahead, chance in enumerate(proposer.chances(min(WIDEST, most) - 1), 1):
                tokens += chance
                if tokens / costs[ahead] > rate:
                    best, chosen, rate = ahead, proposer, tokens / costs[ahead]
        if chosen is None:
            return []
        given = self.cache, self.policies, self.recall
        self.reason = reason_against("speculation", self.model, *given)
        if self.reason or (count := min(best, room_ahead(*given) - 1)) < 1:
            return []
        return self._unless_short(partial(chosen.proposed, count)) or []

    def _pass(self, token_ids: list[int]) -> Tensor:
        """Put the next token through with those proposed."""
        replayed = None if self.graphs is None else self._replayed(self.graphs, token_ids)
        if replayed is not None:
            rows, logits = replayed
        else:
            rows = self._rows(token_ids)
            logits = step_alone(self.model, rows)
        self._ahead, self.proposed = rows, self.proposed + len(token_ids) - 1
        return logits

    def _replayed(
        self, graphs: GraphDecoder, token_ids: list[int]
    ) -> tuple[StepRows, Tensor] | None:
        """By a graph, of which every pass is as wide: behind what is proposed the last token comes
        again, and is not asked for. None if a plain step has to do it."""
        if room_ahead(self.cache, self.policies, self.recall) < WIDEST:
            return None
        rows = self._rows(token_ids + token_ids[-1:] * (WIDEST - len(token_ids)))
        logits = graphs.step([rows])
        return None if logits is None else (rows, logits[:1])

    def _rows(self, token_ids: list[int]) -> StepRows:
        given = self.cache, torch.tensor([token_ids]), self.policies, self.recall
        return StepRows(self.model, *given)

    def _unless_short(self, work: Callable[[], T | None]) -> T | None:
        """Do work that changes nothing before it has all the memory it needs; None, and no
        speculation from here on, if there is too little."""
        made = unless_short(self.model.device, lambda: [work()])
        if made is not None:
            return made[0]
        self.off = "memory was short"
        self.leave()
        return None

    def figures(self) -> dict[str, Any]:
        """Fields of an answer's metrics."""
        return {
            "decode_steps": self.steps,
            "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted,
            "no_speculation": self.off or self.reason,
        }
