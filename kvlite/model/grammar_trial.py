"""Grammars of others, tried where they can be stopped, before anything waits for them.

llguidance has limits for most of what a grammar takes. What they leave open (the multiples of a
large number, thousands of properties) is found out in a child process.
"""

import math
import re
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from kvlite.config.checked_file import from_json
from kvlite.config.child_process import ChildEnded, run_in_child
from kvlite.errors import require_uncancelled

_T = TypeVar("_T")
# What a trial may take: seconds of a processor, Python's start included, and bytes.
SECONDS, MEMORY = 2, 1 << 30
# Trials at once.
_PLACES = threading.BoundedSemaphore(2)
# Set once nobody waits for the grammar.
GIVEN_UP: ContextVar[threading.Event | None] = ContextVar("GIVEN_UP", default=None)
TOO_HARD = f"to prepare it takes more than {SECONDS} s, or more than {MEMORY >> 30} GiB"

# Schemas that cost milliseconds whatever they say: short, with nothing but these keywords and no
# large numbers. They need no trial.
_SHORT, _LARGE = 8192, 10_000
_ABOUT = frozenset({"title", "description", "default", "examples", "$schema"})
_DATA = frozenset({"enum", "const", "type", "required"}) | _ABOUT
_NAMED = frozenset({"properties", "$defs", "definitions"})
_SCHEMAS = frozenset({"items", "additionalProperties", "anyOf"})
_NUMBERS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"})
# Keywords that must be alone in a schema, else both are to be followed.
_ALONE = frozenset({"anyOf", "$ref"})


_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.\deE]+)')
_MULTIPLES = 1_000_000


class TooHard(Exception):
    """A grammar takes too much time or memory."""


def is_bomb(text: str) -> bool:
    """Whether a schema, or a grammar with one, has multiples that llguidance counts one by one once
    an answer has come to them; those of several schemas may have to hold together."""
    found = {int(re.sub(r"\D", "", each)[:300] or 1) for each in _MULTIPLE.findall(text)}
    return math.prod(found) > _MULTIPLES


def limits() -> Any:
    """What llguidance may take for a grammar, and for a token of it."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
    )


def tried(work: Callable[..., _T], *args: Any) -> _T:
    """What a function makes of grammars, in a child process. Raises TooHard if that takes too much
    time or memory; Stopped if nobody waits for it any more."""
    given_up = GIVEN_UP.get()
    while not _PLACES.acquire(timeout=0.05):
        require_uncancelled(given_up)
    try:
        return run_in_child(work, *args, cancel=given_up, memory=MEMORY, seconds=SECONDS)
    except (MemoryError, TimeoutError, ChildEnded):
        raise TooHard from None
    finally:
        _PLACES.release()


def is_cheap(text: str) -> bool:
    """Whether a schema as JSON needs no trial."""
    if len(text) > _SHORT:
        return False
    try:
        return _is_cheap(from_json(text))
    except (ValueError, RecursionError):
        return False


def _is_cheap(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    if _ALONE & {*schema} and {*schema} - _ABOUT - {"$defs", "definitions"} not in (
        {"anyOf"},
        {"$ref"},
    ):
        return False
    return all(_is_cheap_part(key, value) for key, value in schema.items())


def _is_cheap_part(key: str, value: Any) -> bool:
    if key in _DATA:
        return True
    if key == "$ref":
        return str(value).startswith("#")
    if key in _NUMBERS:
        return isinstance(value, int) and (key.endswith("imum") or abs(value) <= _LARGE)
    if key in _NAMED:
        return isinstance(value, dict) and all(map(_is_cheap, value.values()))
    if key in _SCHEMAS:
        return all(map(_is_cheap, value if isinstance(value, list) else [value]))
    return False
