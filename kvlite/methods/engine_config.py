"""Settings as the engine takes them: every text parsed, once, before anything is read or loaded.

`Settings` checks types and ranges and imports nothing. Here methods, budgets, bits and sizes are
parsed: before a profile is saved, a document read or a model loaded, so that an error names the
variable or the file that a text comes from. Nothing here imports torch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlite.cache.bits import KVBits, parse_kv_bits
from kvlite.config.settings import Settings, flag_of
from kvlite.errors import SettingError
from kvlite.memory.device_budget import capped_bytes, checkpoint_limit, ram_limit
from kvlite.methods import Method, parse_method
from kvlite.methods.budget import Budget, method_and_budget, parse_budget
from kvlite.methods.layer_policy import require_growing, require_in_sight


@dataclass(frozen=True)
class EngineConfig:
    """Settings and what their texts mean; replaced whole when a setting changes.

    Attributes:
        settings: as they were given.
        method: not fitted to a model yet.
        budget: how much of what was read the cache keeps.
        kv_bits: of keys and values in the cache; None if they are not quantized.
        recall_bits: likewise, of what is kept to be recalled.
    """

    settings: Settings
    method: Method
    budget: Budget
    kv_bits: KVBits | None
    recall_bits: KVBits | None

    @classmethod
    def from_settings(cls, settings: Settings) -> "EngineConfig":
        """Parse them.

        Raises:
            SettingError: a method, a budget, bits or a limit mean nothing, or the first two do not
                fit each other.
        """
        method, budget = method_and_budget(settings.method, settings.budget)
        ram_limit(settings.recall_limit, 0)
        checkpoint_limit(settings.checkpoint_limit)
        bits = parse_kv_bits(settings.kv_bits), parse_kv_bits(settings.recall_bits)
        return cls(settings, method, budget, *bits)

    def after_load(self, values: Mapping[str, Any]) -> "EngineConfig":
        """With some settings changed, once a model is loaded.

        Raises:
            SettingError: as `Settings.after_load` and `from_settings`.
        """
        if not values:
            return self
        return EngineConfig.from_settings(self.settings.after_load(values))

    @property
    def ignores_recall(self) -> bool:
        """Whether a turn does not look at what can be recalled, which later turns may: they read
        again what they missed."""
        return self.method.prefilling.mask is not None and self.settings.recall == "auto"

    @property
    def checkpoint_limit(self) -> int:
        """Bytes of host memory that checkpoints may take now."""
        return checkpoint_limit(self.settings.checkpoint_limit)


def require_meanings(settings: Settings, called: Callable[[str], str] = flag_of) -> EngineConfig:
    """Check what settings mean, each of them and together: all that can be refused without a model.

    Args:
        called: what a setting's value is called where it was given, for errors.

    Returns:
        What they mean.

    Raises:
        SettingError: one of them means nothing, or they do not fit each other.
    """
    for name in _READERS:
        require_meaning(name, getattr(settings, name), called(name))
    config = EngineConfig.from_settings(settings)
    require_growing(config.kv_bits, config.method)
    require_in_sight(config.method, settings.recall)
    return config


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
