"""The methods kvlite knows. Adding one is one file and one line here."""

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from kvlite.config.units import parse_number
from kvlite.errors import SettingError
from kvlite.methods.base import LayerView, Method
from kvlite.methods.chai import CHAI
from kvlite.methods.full import Full
from kvlite.methods.h2o import H2O
from kvlite.methods.keydiff import KeyDiff
from kvlite.methods.kvx import KVX
from kvlite.methods.kvzip import KVzip
from kvlite.methods.lminfinite import LMInfinite
from kvlite.methods.minference import MInference
from kvlite.methods.minicache import MiniCache
from kvlite.methods.pyramidinfer import PyramidInfer
from kvlite.methods.pyramidkv import PyramidKV
from kvlite.methods.random import Random
from kvlite.methods.simlayerkv import SimLayerKV
from kvlite.methods.snapkv import SnapKV
from kvlite.methods.spans import Spans
from kvlite.methods.streaming import Streaming
from kvlite.methods.tova import TOVA
from kvlite.methods.uncomp import UNComp

__all__ = ["METHODS", "LayerView", "Method", "Streaming", "parse_method", "renamed"]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        *(Full, Spans, Random, Streaming, LMInfinite, SnapKV, PyramidKV, KVX, H2O, TOVA, KeyDiff),
        *(KVzip, UNComp, PyramidInfer, MiniCache, CHAI, SimLayerKV, MInference),
    )
}

# Methods that have a name of their own now, by the spelling that older files have.
ALIASES: dict[str, Method] = {
    "kvx:pool=31,layers=uniform,queries=max,heads=max,omega=16,alpha=32,decode=grow": Spans()
}

# More parts than any method that holds others can have, and the largest number of an option.
_DEEPEST, _LARGEST = 8, 2**31 - 1


def parse_method(spec: str) -> Method:
    """The method a user wrote: `kvx`, with options `kvx:omega=8,pool=31`, or one that holds
    another, `simlayerkv:threshold=0.8+kvx:omega=8`.

    Raises:
        SettingError: no such method or option, an option given twice, or a value of the wrong kind.
    """
    own, *held = spec.strip().split("+", _DEEPEST)
    if len(held) == _DEEPEST:
        raise SettingError(
            f"--method {spec!r} holds too many methods in each other: give one or two"
        )
    inner = None
    for each in reversed(held):
        inner = _parsed(each, inner)
    return _parsed(own, inner)


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a file of an older version has them, by the names of this one."""
    settings = dict(settings)
    method = ALIASES.get(str(settings.get("method")))
    return settings if method is None else {**settings, "method": method.spec}


def _parsed(text: str, inner: Method | None) -> Method:
    """One method, and the one it holds."""
    name, _, options = text.partition(":")
    if name not in METHODS:
        raise SettingError(f"unknown method {name!r}: choose from {', '.join(METHODS)}")
    kind = METHODS[name]
    hints = get_type_hints(kind)
    known = {name: hints[name] for name in kind.defaults()}
    values: dict[str, object] = {}
    if inner is not None:
        if "inner" not in hints:
            holders = [each for each, other in METHODS.items() if "inner" in get_type_hints(other)]
            raise SettingError(f"method {name} holds no other: only {' and '.join(holders)} do")
        values["inner"] = inner
    for pair in filter(None, options.split(",")):
        key, _, value = pair.partition("=")
        if key not in known:
            offer = ", ".join(known) or "none"
            raise SettingError(f"method {name} has no option {key!r}: it has {offer}")
        if key in values:
            raise SettingError(f"method {name} has option {key!r} twice: give it once")
        values[key] = _value(f"{name}:{key}", value, known[key])
    method = kind(**values)
    return ALIASES.get(method.spec, method)


def _value(where: str, text: str, hint: object) -> object:
    choices = get_args(hint)
    if float in choices:
        words = [word for each in choices for word in get_args(each)]
        return text if text in words else _value(where, text, float)
    if choices:
        if text not in choices:
            raise SettingError(f"{where}={text!r} is not one of {', '.join(choices)}")
        return text
    if hint is bool:
        if text not in ("true", "false", "True", "False"):
            raise SettingError(f"{where}={text!r} is not true or false")
        return text.lower() == "true"
    number = parse_number(text, whole=hint is not float)
    if number is None or abs(number) > _LARGEST:
        raise SettingError(
            f"{where}={text!r} is not a number" + (" up to 2147483647" if number else "")
        )
    return number
