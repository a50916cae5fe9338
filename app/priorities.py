"""What matters most to someone, as settings: one control in the place of six."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlite.config.settings import OPTIONS, Settings

# The settings that a priority decides.
DECIDES = ("method", "budget", "kv_bits", "recall", "recall_bits", "recall_entries")


@dataclass(frozen=True)
class Priority:
    """Something to put first.

    Attributes:
        changes: from the defaults of the settings that it decides.
        about: what it does, and by which method.
    """

    name: str
    changes: Mapping[str, Any]
    about: str

    @property
    def values(self) -> dict[str, Any]:
        """What it decides, in the order of `DECIDES`."""
        return {name: self.changes.get(name, OPTIONS[name].default) for name in DECIDES}


PRIORITIES = (
    Priority(
        "Exactness",
        {"method": "full"},
        "Method full: everything that was read stays in the cache, and takes the most memory.",
    ),
    Priority(
        "Balanced",
        {},
        f"Method {Settings.method}: everything stays while it fits, and of longer texts the "
        "passages that your question looks at. The rest is offloaded to RAM and fetched back where "
        "an answer needs it.",
    ),
    Priority(
        "Speed",
        {"recall_entries": 0},
        f"Method {Settings.method}: as balanced, but nothing is fetched back while an answer "
        "comes, only before the next one.",
    ),
    Priority(
        "Least memory",
        {"budget": "10%", "kv_bits": "4", "recall_bits": "4"},
        f"Method {Settings.method}: a tenth stays, in 4 bits, and so does what is offloaded.",
    ),
)
_OTHER = "None of these: your own settings, below."


def named(name: str) -> Priority | None:
    """The priority of this name."""
    return next((each for each in PRIORITIES if each.name == name), None)


def priority_of(shown: Sequence[Any]) -> Priority | None:
    """The priority that the controls' values come to, in the order of the settings."""
    values = dict(zip(OPTIONS, shown, strict=True))
    own = {name: values[name] for name in DECIDES}
    return next((each for each in PRIORITIES if each.values == own), None)


def about(priority: Priority | None) -> str:
    """What is said of it."""
    return _OTHER if priority is None else priority.about
