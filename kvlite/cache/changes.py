"""Changes that are made all or none."""

from collections import deque
from collections.abc import Iterable
from itertools import starmap

Change = tuple[object, str, object]
"""An attribute of something, and what it becomes."""


def make_all(changes: Iterable[Change]) -> None:
    """Make changes between which no Python code runs, so that an interrupt comes before or after
    all of them."""
    deque(starmap(setattr, [*changes]), maxlen=0)
