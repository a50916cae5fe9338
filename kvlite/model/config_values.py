"""The values of an object in a config, and sentences about what is wrong with them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlite.errors import ModelError

# Keys, what their values must be where they are given and not null, and how that is said.
Rule = tuple[str, Callable[[Any], bool], str]


class Values:
    """The values of an object in a config, and sentences about what is wrong with them."""

    def __init__(self, config: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.config, self.path, self.prefix = config, path, prefix

    def fault(self, key: str, wanted: str) -> ModelError:
        """The error over a key's value, or over none, where something else is wanted."""
        name = self.prefix + key
        has = f"has no {name}"
        if key in self.config:
            has = f"says {name} is {shown(self.config[key])}"
        return ModelError(f"{self.path} {has}: {wanted}; get the model's own {self.path.name}")

    def require(self, key: str, holds: Callable[[Any], bool], wanted: str) -> None:
        """Raises ModelError if a value is given, and not null, that does not hold."""
        value = self.config.get(key)
        if value is not None and not holds(value):
            raise self.fault(key, wanted)

    def require_all(self, rules: tuple[Rule, ...]) -> None:
        """Raises ModelError if a rule is broken."""
        for keys, holds, wanted in rules:
            for key in keys.split():
                self.require(key, holds, wanted)

    def require_whole(self, key: str, least: int, most: int) -> None:
        """Raises ModelError unless a value that is given is a whole number in a range."""
        value = self.config[key]
        if not is_whole(value) or not least <= value <= most:
            raise self.fault(key, f"it must be a whole number from {least} to {most:,}")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, and no truth value."""
    return type(value) is int


def shown(value: Any) -> str:
    """A value as JSON, at most 60 characters of it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
