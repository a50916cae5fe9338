"""Settings kept under a name: one TOML file a profile, which holds only what it sets."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from kvlite.config.atomic_file import replaced
from kvlite.config.environment import PROFILE
from kvlite.config.settings import checked, require_known
from kvlite.errors import SettingError

# Taken where none is named, if there is one; and the name that stands for no profile.
DEFAULT, NONE = "default", "none"

_SUFFIX = ".toml"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Profile:
    """Some settings' values, checked.

    Attributes:
        path: the file it was read from.
        values: by the settings' names.
    """

    name: str
    path: Path
    values: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return {"name": self.name, "path": str(self.path), "settings": dict(self.values)}


class Profiles:
    """The profiles in a folder, which need not be there.

    Attributes:
        folder: where the files lie.
    """

    def __init__(self, config: Path) -> None:
        """Look at the profiles of a configuration, without writing to it."""
        self.folder = config / "profiles"

    def names(self) -> list[str]:
        """Of all profiles, broken ones too, in alphabetical order.

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
        """Where a profile lies, or would.

        Args:
            called: what the name is called where it was given, for the error.

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
        """A profile, all of it checked.

        Raises:
            SettingError: there is none of this name, or its file is damaged, or holds what is no
                setting, or a value out of range; the message names the file.
        """
        path = self.path(name, called)
        found = _read(name, path)
        if found is None:
            raise self._absent(name, called)
        return found

    def read_all(self) -> tuple[list[Profile], dict[Path, str]]:
        """All profiles in alphabetical order, and what is wrong with those that are broken."""
        good, broken = list[Profile](), dict[Path, str]()
        for name in self.names():
            try:
                good.append(self.read(name))
            except SettingError as error:
                broken[self.path(name)] = str(error)
        return good, broken

    def chosen(self, named: str | None, environment: Mapping[str, str]) -> Profile | None:
        """The profile to use: as named, else by `KVLITE_PROFILE`, else `default` if there is one.

        Raises:
            SettingError: as `read`.
        """
        name, called = named, "--profile"
        if name is None:
            name, called = environment.get(PROFILE) or None, PROFILE
        if name is None:
            return _read(DEFAULT, self.path(DEFAULT))
        return None if name == NONE else self.read(name, called)

    def save(self, name: str, values: Mapping[str, Any], *, force: bool = False) -> Profile:
        """Write a profile whole or not at all; a kill leaves the one before as it was.

        Args:
            values: checked ones, by the settings' names.
            force: whether one of the same name is overwritten.

        Raises:
            SettingError: no profile can have this name, one has it already, a value is no text
                that a file can hold, or the folder cannot be written to.
        """
        path = self.path(name)
        text = _written(values)
        try:
            if path.exists() and not force:
                raise SettingError(
                    f"profile {name!r} is there already ({path}): give --force to overwrite it"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(path) as file:
                file.write(text)
        except OSError as error:
            raise SettingError(
                f"{path} cannot be written ({error.strerror}): KVLITE_CONFIG names another folder"
            ) from None
        return Profile(name, path, dict(values))

    def delete(self, name: str) -> Path:
        """Remove a profile, a broken one too; the path that it had.

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
        there = f"there is {', '.join(names)}" if names else "none was saved yet"
        return SettingError(
            f"{called} {name!r} is no profile in {self.folder}: {there} (see `kvlite profile "
            "--help`)"
        )


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and text != NONE


def _read(name: str, path: Path) -> Profile | None:
    """The profile in a file, None if there is none."""
    try:
        if not S_ISREG(path.stat().st_mode) and not path.is_dir():  # a pipe would be waited for
            raise SettingError(f"{path} is not a file: remove it, or take another profile")
        plain = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read ({error.strerror}): mend it, or take another profile"
        ) from None
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise SettingError(
            f"{path} is not readable TOML ({line}): mend it, or save it anew with `kvlite profile "
            f"save {name} --force`"
        ) from None
    require_known(plain, f"{path}: ")
    values = {each: checked(each, value, f"{path}: {each}") for each, value in plain.items()}
    return Profile(name, path, values)


def _written(values: Mapping[str, Any]) -> bytes:
    """Values as TOML."""
    import tomli_w

    for name, value in values.items():
        texts = value if isinstance(value, tuple) else (value,)
        for text in texts:
            if isinstance(text, str) and not _encodes(text):
                raise SettingError(
                    f"{name} {value!r} is no text that a file can hold: leave it out"
                )
    given = {name: value for name, value in values.items() if value is not None}
    return tomli_w.dumps(given).encode("utf-8")


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
