"""Settings as the engine takes them: methods, budgets, bits and sizes are parsed, once.

This happens before a profile is saved, a document read or a model loaded, so that an error names
the variable or the file that a value comes from. Nothing here imports torch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvlite.cache.bits import KVBits, parse_kv_bits
from kvlite.config.settings import Settings, flag_of
from kvlite.config.units import parse_number
from kvlite.documents.plain_text import require_encoding
from kvlite.documents.scans import require_ocr
from kvlite.errors import SettingError
from kvlite.memory.device_budget import (
    capped_bytes,
    checkpoint_limit,
    parse_checkpoint_limit,
    parse_recall_limit,
)
from kvlite.methods import Method, parse_method
from kvlite.methods.budget import Budget, parse_budget, require_budget
from kvlite.methods.layer_policy import require_growing, require_in_sight
from kvlite.model.devices import require_device
from kvlite.model.grammar import require_grammar
from kvlite.model.jinja_template import read_template


@dataclass(frozen=True)
class EngineConfig:
    """Settings and their parsed values; replaced whole when a setting changes.

    Attributes:
        method: not fitted to a model yet.
        kv_bits: of the cache; None if it is not quantized.
        recall_bits: likewise, of the host store.
        recall_limit, checkpoint_limit, vram: bytes; None for a share of what is free.
        logit_bias: what is added to the logits of tokens.
        chat_template: what is in the file; "" for the model's own.
    """

    settings: Settings
    method: Method
    budget: Budget
    kv_bits: KVBits | None
    recall_bits: KVBits | None
    recall_limit: int | None
    checkpoint_limit: int | None
    vram: int | None
    logit_bias: Mapping[int, float]
    chat_template: str

    @classmethod
    def from_settings(
        cls, settings: Settings, called: Callable[[str], str] = flag_of
    ) -> "EngineConfig":
        """Parse settings.

        Args:
            called: given a setting's name, what errors call the setting.

        Raises:
            SettingError: one of them cannot be parsed, or method and budget do not fit each other.
        """
        parsed = {name: _parsed(name, getattr(settings, name), called(name)) for name in _PARSERS}
        config = cls(settings, **{name: parsed[name] for name in parsed.keys() & _KEPT})
        config._require_consistent()
        return config

    def changed(self, settings: Settings) -> "EngineConfig":
        """With other settings, of which those that differ are parsed; raises as `from_settings`."""
        parsed = {
            name: _parsed(name, value, flag_of(name))
            for name in _PARSERS
            if (value := getattr(settings, name)) != getattr(self.settings, name)
        }
        kept = {name: parsed[name] for name in parsed.keys() & _KEPT}
        config = replace(self, settings=settings, **kept)
        config._require_consistent()
        return config

    def after_load(self, values: Mapping[str, Any]) -> "EngineConfig":
        """With some settings changed after a model was loaded; raises as `Settings.after_load` and
        `from_settings`."""
        return self.changed(self.settings.after_load(values)) if values else self

    def _require_consistent(self) -> None:
        if self.budget.entries is not None:
            require_budget(self.method, self.budget.entries)
        if self.method.needs_text and self.settings.beyond_context == "compact":
            raise SettingError(
                "--beyond-context compact gives entries other positions than the text has, by "
                f"which structure of --method {self.settings.method} finds punctuation: leave one "
                "out"
            )

    @property
    def ignores_recall(self) -> bool:
        """Whether a turn does not recall, although later turns may: these read again what they
        missed."""
        return self.method.prefilling.mask is not None and self.settings.recall == "auto"

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of host memory that checkpoints may take now."""
        return checkpoint_limit(self.checkpoint_limit)


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """What is added to the logits of tokens.

    Raises:
        SettingError: one is no token and number, or out of range.
    """
    made = dict[int, float]()
    for each in pairs:
        token, _, bias = each.partition(":")
        number = parse_number(bias, whole=False)
        if not re.fullmatch("[0-9]{1,9}", token) or number is None or not abs(number) <= 100:
            raise SettingError(
                f"--logit-bias {each!r} is not a token's number and a bias between -100 and 100, "
                "as in 5:-100"
            )
        made[int(token)] = float(number)
    return made


def require_meanings(
    settings: Settings | EngineConfig, called: Callable[[str], str] = flag_of
) -> EngineConfig:
    """Parse settings, unless they are, and refuse all that can be refused without a model.

    Args:
        called: given a setting's name, what errors call it: what it is called where it was given.

    Raises:
        SettingError: one of them cannot be parsed, or they do not fit each other.
    """
    config = settings
    if isinstance(config, Settings):
        config = EngineConfig.from_settings(config, called)
    require_growing(config.kv_bits, config.method)
    require_in_sight(config.method, config.settings.recall)
    return config


def require_meaning(name: str, value: Any, called: str) -> None:
    """Raises SettingError if a setting's value cannot be parsed; the error calls it `called`."""
    if name in _PARSERS:
        _parsed(name, value, called)


def _parsed(name: str, value: Any, called: str) -> Any:
    try:
        return _PARSERS[name](value)
    except SettingError as error:
        said, flag = str(error), flag_of(name)
        if called == flag:
            raise
        named = said.startswith(f"{flag} ")
        raise SettingError(called + said[len(flag) :] if named else f"{called}: {said}") from None


_PARSERS: Mapping[str, Callable[[Any], object]] = {
    "method": parse_method,
    "budget": parse_budget,
    "kv_bits": parse_kv_bits,
    "recall_bits": parse_kv_bits,
    "recall_limit": parse_recall_limit,
    "checkpoint_limit": parse_checkpoint_limit,
    "vram": capped_bytes,
    "schema": require_grammar,
    "logit_bias": parse_logit_bias,
    "device": require_device,
    "ocr": require_ocr,
    "encoding": require_encoding,
    "chat_template": read_template,
}
_KEPT = {each.name for each in fields(EngineConfig)}
