"""Which value of a setting is taken, where several places name one, and which place it was.

A flag goes before the environment, the environment before a profile, a profile before the default.
Only the command line resolves settings: `kvlite.load` takes what it is given, and defaults.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvlite.config.environment import read_variable, variable_of
from kvlite.config.profiles import Profile
from kvlite.config.settings import OPTIONS, Settings, flag_of


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        name: of the flag, the variable, or the profile; empty for a default.
        path: of the profile.
    """

    kind: Literal["flag", "environment", "profile", "default"]
    name: str = ""
    path: Path | None = None

    def __str__(self) -> str:
        said = f"{self.kind} {self.name}" if self.name else self.kind
        return said if self.path is None else f"{said} ({self.path})"

    def called(self, setting: str) -> str:
        """What a setting's value is called there, for errors."""
        if self.path is not None:
            return f"{self.path}: {setting}"
        return self.name or flag_of(setting)

    def to_json(self) -> dict[str, str]:
        """Plain values by name, those that there are."""
        plain = {"from": self.kind, "name": self.name, "path": str(self.path or "")}
        return {key: value for key, value in plain.items() if value}


@dataclass(frozen=True)
class Resolved:
    """Settings, and where each that was asked for comes from, by name.

    Attributes:
        profile: the one that was looked into, whether or not it decided anything.
    """

    settings: Settings
    origins: Mapping[str, Origin]
    profile: Profile | None

    def outside(self) -> dict[str, Origin]:
        """Origins of values that come from the environment or a profile."""
        kinds = ("environment", "profile")
        return {name: origin for name, origin in self.origins.items() if origin.kind in kinds}

    def noted(self, error: Exception) -> Exception:
        """An error, with notes of where values come from that it calls by their flags, though none
        was given."""
        for name, origin in self.outside().items():
            flag, value = flag_of(name), getattr(self.settings, name)
            if f"{flag} {value} " in f"{error} " or f"{flag} {value!r}" in str(error):
                error.add_note(f"{flag} is from {origin}")
        return error


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    profile: Profile | None,
    names: Iterable[str] = OPTIONS,
) -> Resolved:
    """The value of each setting from the highest place that has one.

    Args:
        flags: what was given on the command line, by the settings' names.
        environment: variables, of which only those are read that decide something; an empty one
            is as none.
        names: settings that are resolved; others have their defaults.

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
            values[name] = read_variable(name, text)
            origins[name] = Origin("environment", variable)
        elif profile is not None and name in profile.values:
            values[name] = profile.values[name]
            origins[name] = Origin("profile", profile.name, profile.path)
        else:
            origins[name] = Origin("default")
    return Resolved(Settings(**values), origins, profile)
