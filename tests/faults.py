"""Memory that runs out when a test wants it to, and an account of what lives."""

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Site = tuple[str, ...]


class Faults(TorchDispatchMode):
    """Raises torch.OutOfMemoryError instead of some allocations, or of those that would exceed a
    cap. An allocation is an operator that returns a storage which none of its arguments has.

    Attributes:
        at: which allocations fail, counted from 0.
        cap: bytes that may live, if there is a limit; a test may change it at any time.
        count: allocations so far, failed ones included.
        failed: how many of them did.
        live: bytes of what was made within and still lives.
        peak: the most that was.
        sites: with `traces`, where each allocation was asked for.
    """

    def __init__(
        self, at: Collection[int] = (), cap: int | None = None, *, traces: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at = frozenset(at)
        self.cap = cap
        self.traces = traces
        self.count = self.failed = self.live = self.peak = 0
        self.sites: list[Site] = []
        self._refs: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and not to be asked saves a third of the time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _returns_what_it_is_given(func):
            return result
        given = {each.untyped_storage()._cdata for each in _tensors(args)}
        made = {
            each.untyped_storage()._cdata: each.untyped_storage() for each in _tensors([result])
        }
        sizes = {key: made[key].nbytes() for key in made.keys() - given if made[key].nbytes()}
        if sizes:
            self._count(func, sum(sizes.values()))
        for key, size in sizes.items():
            self.live += size
            self.peak = max(self.peak, self.live)
            self._refs[key] = weakref.ref(made[key], partial(self._free, key, size))
        return result

    def _count(self, func: Any, size: int) -> None:
        if self.traces:
            self.sites.append(_site(func))
        number, self.count = self.count, self.count + 1
        if number in self.at or (self.cap is not None and self.live + size > self.cap):
            self.failed += 1
            raise torch.OutOfMemoryError("made up by a test")

    def _free(self, key: int, size: int, ref: Any) -> None:
        self.live -= size
        if self._refs.get(key) is ref:
            del self._refs[key]


@cache
def _returns_what_it_is_given(func: Any) -> bool:
    """Whether an operator's results are views of its arguments, or these themselves."""
    returns = func._schema.returns
    return all(each.alias_info is not None for each in returns)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from _tensors(each)


def _site(func: Any) -> Site:
    """The operator, who called it, and the three innermost places of kvlite."""
    frame, lines = sys._getframe(3), [str(func)]
    while frame is not None and len(lines) < 5:
        file = frame.f_code.co_filename
        own = "/kvlite/" in file
        if own or (len(lines) == 1 and "/torch/" not in file):
            lines.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)
