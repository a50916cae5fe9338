"""What settings that are texts must mean to be of use, whatever the model.

`Settings` checks types and ranges and imports nothing; methods, budgets and sizes are read by those
who know them, when they are used. Here they are read at once: before a profile is saved, and
so that an error names the variable or the file that a text comes from.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvlite.cache import parse_kv_bits
from kvlite.checkpoint import checkpoint_limit
from kvlite.errors import SettingError
from kvlite.memory.room import capped_bytes
from kvlite.methods import parse_method
from kvlite.methods.amount import parse_amount
from kvlite.model.load import choose_device
from kvlite.offload.room import ram_limit
from kvlite.settings import flag_of


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
        named = said.startswith(f"{flag} ")
        raise SettingError(called + said[len(flag) :] if named else f"{called}: {said}") from None


def _device(text: str) -> None:
    """A GPU that is not here may be planned for."""
    if re.fullmatch(r"cuda(:\d{1,3})?", text) is None:
        choose_device(text)


_READERS: Mapping[str, Callable[[str], object]] = {
    "method": parse_method,
    "budget": parse_amount,
    "kv_bits": parse_kv_bits,
    "recall_limit": lambda text: ram_limit(text, 0),
    "checkpoint_limit": checkpoint_limit,
    "vram": capped_bytes,
    "device": _device,
}
