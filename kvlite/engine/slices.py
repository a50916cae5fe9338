"""Work in slices: between two of them others may use the model."""

from collections.abc import Callable, Generator
from functools import wraps
from typing import ParamSpec, TypeVar

T = TypeVar("T")
Given = ParamSpec("Given")

Slices = Generator[None, float | None, T]
"""Work that can wait wherever it yields, and returns its result at the end. Closed before that, it
leaves everything as it was before it. It may be sent the seconds in which nobody wanted it; a part
of it, those that its last part took beside others, if these were many."""

# Seconds that a slice takes, as far as the work has places to wait at.
SLICE_S = 0.2


def in_one_go(slices: Slices[T]) -> T:
    """Do all of the work; returns its result."""
    try:
        while True:
            next(slices)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        slices.close()


def whole(work: Callable[Given, Slices[T]]) -> Callable[Given, T]:
    """The same work as a function that does all of it."""

    @wraps(work)
    def done(*args: Given.args, **options: Given.kwargs) -> T:
        return in_one_go(work(*args, **options))

    return done
