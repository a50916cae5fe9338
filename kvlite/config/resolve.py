"""Which value a setting has, and where it came from.

A flag goes before an environment variable, the variable before a profile, the profile before the
default. Only the command line resolves settings: `kvlite.load` takes what it is given.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvlite.config.environment import read_text, variable_of
from kvlite.config.profiles import Profile
from kvlite.config.settings import OPTIONS, Settings, flag_of


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    Attributes:
        name: of the flag, the variable, or the profile; empty for a default.
        path: the profile's file.
    """

    kind: Literal["flag", "environment", "profile", "default"]
    name: str = ""
    path: Path | None = None

    def __str__(self) -> str:
        said = f"{self.kind} {self.name}" if self.name else self.kind
        return said if self.path is None else f"{said} ({self.path})"

    def called(self, setting: str) -> str:
        """What errors call a setting that came from here."""
        if self.path is not None:
            return f"{self.path}: {setting}"
        return self.name or flag_of(setting)

    def to_json(self) -> dict[str, str]:
        """Plain values by name, without empty ones."""
        plain = {"from": self.kind, "name": self.name, "path": str(self.path or "")}
        return {key: value for key, value in plain.items() if value}


@dataclass(frozen=True)
class Resolved:
    """Settings, where each came from, and the profile that was read, even if it decided nothing."""

    settings: Settings
    origins: Mapping[str, Origin]
    profile: Profile | None

    @property
    def given(self) -> frozenset[str]:
        """The names of settings that are not left at their defaults."""
        return frozenset(name for name, each in self.origins.items() if each.kind != "default")

    def noted(self, error: Exception) -> Exception:
        """Add a note to an error for each flag it names that was not given as a flag."""
        for name, origin in self.origins.items():
            flag, value = flag_of(name), getattr(self.settings, name)
            named = f"{flag} {value} " in f"{error} " or f"{flag} {value!r}" in str(error)
            if named and origin.kind in ("environment", "profile"):
                error.add_note(f"{flag} is from {origin}")
        return error


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    profile: Profile | None,
    names: Iterable[str] = OPTIONS,
) -> Resolved:
    """Take each setting from the first place that has it.

    Args:
        flags: values from the command line, by the settings' names.
        environment: variables; an empty one counts as unset, and one that decides nothing is not
            read.
        names: the settings to resolve; the others keep their defaults.

    Raises:
        SettingError: a value is out of range; the message names the place.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name in names:
        variable = variable_of(name)
        if name in flags:
            values[name], origins[name] = flags[name], Origin("flag", flag_of(name))
        elif text := environment.get(variable):
            values[name] = read_text(name, text, variable)
            origins[name] = Origin("environment", variable)
        elif profile is not None and name in profile.values:
            values[name] = profile.values[name]
            origins[name] = Origin("profile", profile.name, profile.path)
        else:
            origins[name] = Origin("default")
    return Resolved(Settings(**values), origins, profile)
