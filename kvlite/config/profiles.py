"""Settings kept under a name: a TOML file for each profile, with the settings it sets."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from kvlite.config.atomic_file import replaced
from kvlite.config.checked_file import Damaged, from_toml
from kvlite.config.environment import PROFILE
from kvlite.config.settings import checked, require_known
from kvlite.errors import SettingError

# The profile used if none is named, and the name that stands for no profile.
DEFAULT, NONE = "default", "none"

_SUFFIX = ".toml"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Profile:
    """Checked values by the settings' names, and the file they are from."""

    name: str
    path: Path
    values: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return {"name": self.name, "path": str(self.path), "settings": dict(self.values)}


class Profiles:
    """The profiles in the `profiles` folder of a configuration; the folder need not exist."""

    def __init__(self, config: Path) -> None:
        self.folder = config / "profiles"

    def names(self) -> list[str]:
        """All profiles in alphabetical order, broken ones too.

        Raises:
            SettingError: the folder cannot be read.
        """
        try:
            files = [Path(file) for file in os.listdir(self.folder)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise SettingError(
                f"{self.folder} cannot be read ({error.strerror}): KVLITE_CONFIG names another "
                "folder"
            ) from None
        return sorted(file.stem for file in files if file.suffix == _SUFFIX and _is_name(file.stem))

    def path(self, name: str, called: str = "profile") -> Path:
        """Where a profile is, or would be.

        Args:
            called: what errors call the name.

        Raises:
            SettingError: no profile can have this name.
        """
        if not _is_name(name):
            reserved = f"; {NONE} stands for no profile" if name == NONE else ""
            raise SettingError(
                f"{called} {name!r} cannot be a profile's name: use up to 64 letters, digits, - "
                f"and _{reserved}"
            )
        return self.folder / f"{name}{_SUFFIX}"

    def read(self, name: str, called: str = "profile") -> Profile:
        """Read and check a profile.

        Raises:
            SettingError: there is none of this name, or its file is damaged or has an unknown
                setting or a value out of range; the message names the file.
        """
        found = _read(name, self.path(name, called))
        if found is None:
            raise self._absent(name, called)
        return found

    def chosen(self, named: str | None, environment: Mapping[str, str]) -> Profile | None:
        """The profile to use: `named`, else `KVLITE_PROFILE`, else `default` if it exists.

        Raises:
            SettingError: as `read`.
        """
        name, called = named, "--profile"
        if name is None:
            name, called = environment.get(PROFILE) or None, PROFILE
        if name is None:
            return _read(DEFAULT, self.path(DEFAULT))
        return None if name == NONE else self.read(name, called)

    def require_new(self, name: str) -> None:
        """Raises SettingError if a profile has this name already, or none can have it."""
        path = self.path(name)
        if path.exists():
            raise SettingError(
                f"profile {name!r} is there already ({path}): give --force to overwrite it"
            )

    def save(
        self, name: str, values: Mapping[str, Any], *, force: bool = False, note: str = ""
    ) -> Profile:
        """Write checked values as a profile, whole or not at all.

        Args:
            note: one line that stands above them, for whoever opens the file.

        Raises:
            SettingError: no profile can have this name, one has it already and `force` is False, a
                value cannot be written as UTF-8, or the folder cannot be written to.
        """
        path = self.path(name)
        text = (f"# {note}\n".encode() if note else b"") + _written(values)
        try:
            if not force:
                self.require_new(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(path) as file:
                file.write(text)
        except OSError as error:
            raise SettingError(
                f"{path} cannot be written ({error.strerror}): KVLITE_CONFIG names another folder"
            ) from None
        return Profile(name, path, dict(values))

    def delete(self, name: str) -> Path:
        """Remove a profile, even a broken one, and return its path.

        Raises:
            SettingError: there is none of this name, or its file cannot be removed.
        """
        path = self.path(name)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            raise self._absent(name, "profile") from None
        except OSError as error:
            raise SettingError(
                f"{path} cannot be deleted ({error.strerror}): remove it by hand"
            ) from None
        return path

    def _absent(self, name: str, called: str) -> SettingError:
        names = self.names()
        there = f"saved are {', '.join(names)}" if names else "none was saved yet"
        return SettingError(
            f"{called} {name!r} is no profile in {self.folder}: {there} (see `kvlite profile "
            "--help`)"
        )


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and text != NONE


def _read(name: str, path: Path) -> Profile | None:
    try:
        if not S_ISREG(path.stat().st_mode) and not path.is_dir():  # reading a pipe would hang
            raise SettingError(f"{path} is not a file: remove it, or take another profile")
        plain = from_toml(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read ({error.strerror}): mend it, or take another profile"
        ) from None
    except Damaged as error:
        raise SettingError(
            f"{path} is not readable TOML ({error}): mend it, or save it anew with `kvlite profile "
            f"save {name} --force`"
        ) from None
    require_known(plain, f"{path}: ")
    values = {each: checked(each, value, f"{path}: {each}") for each, value in plain.items()}
    return Profile(name, path, values)


def _written(values: Mapping[str, Any]) -> bytes:
    import tomli_w

    lines = []
    for name, value in values.items():
        if value is None:
            continue
        try:
            lines.append(tomli_w.dumps({name: value}).encode("utf-8"))
        except UnicodeEncodeError:
            raise SettingError(
                f"{name} {value!r} is no text that a file can hold: leave it out"
            ) from None
    return b"".join(lines)
