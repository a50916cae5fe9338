"""What settings that are texts must mean to be of use, whatever the model.

`Settings` checks types and ranges and imports nothing; methods, budgets and sizes are read by those
who know them, when they are used. Here they are read at once: before a profile is saved, before a
document is read or a model loaded, and so that an error names the variable or the file that a text
comes from. Nothing here imports torch.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvlite.cache.bits import parse_kv_bits
from kvlite.config.settings import Settings, flag_of
from kvlite.errors import SettingError
from kvlite.memory.device_budget import capped_bytes, checkpoint_limit, ram_limit
from kvlite.methods import parse_method
from kvlite.methods.budget import method_and_budget, parse_budget
from kvlite.methods.layer_policy import require_growing, require_in_sight


def require_meanings(settings: Settings, called: Callable[[str], str] = flag_of) -> None:
    """Check what settings mean, each of them and together: all that can be refused without a model.

    Args:
        called: what a setting's value is called where it was given, for errors.

    Raises:
        SettingError: one of them means nothing, or they do not fit each other.
    """
    for name in _READERS:
        require_meaning(name, getattr(settings, name), called(name))
    method, _ = method_and_budget(settings.method, settings.budget)
    require_growing(parse_kv_bits(settings.kv_bits), method)
    require_in_sight(method, settings.recall)


def require_meaning(name: str, value: Any, called: str) -> None:
    """Check what a setting's value means.

    Args:
        called: what the value is called where it was given, for the error.

    Raises:
        SettingError: it means nothing.
    """
    read = _READERS.get(name)
    if read is None:
        return
    try:
        read(value)
    except SettingError as error:
        said, flag = str(error), flag_of(name)
        if called == flag:
            raise
        named = said.startswith(f"{flag} ")
        raise SettingError(called + said[len(flag) :] if named else f"{called}: {said}") from None


def _require_device(text: str) -> None:
    """A GPU that is not here may be planned for."""
    if re.fullmatch(r"auto|(cpu|cuda)(:[0-9]{1,3})?", text) is None:
        raise SettingError(f"unknown device {text!r}: use auto, cpu or cuda")


_READERS: Mapping[str, Callable[[str], object]] = {
    "method": parse_method,
    "budget": parse_budget,
    "kv_bits": parse_kv_bits,
    "recall_limit": lambda text: ram_limit(text, 0),
    "checkpoint_limit": checkpoint_limit,
    "vram": capped_bytes,
    "device": _require_device,
}
