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

# Schemas need no trial that are short, with no large numbers and nothing but these keywords: they
# cost milliseconds whatever they say.
_SHORT, _LARGE = 8192, 10_000
_ABOUT = ("title", "description", "default", "examples", "$schema")
_PARTS = ("$defs", "definitions")
_CHEAP: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys((*_ABOUT, "enum", "const", "type", "required"), lambda value: True),
    **dict.fromkeys(("minimum", "maximum"), lambda value: isinstance(value, int)),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength"),
        lambda value: isinstance(value, int) and abs(value) <= _LARGE,
    ),
    **dict.fromkeys(
        (*_PARTS, "properties"),
        lambda value: isinstance(value, dict) and all(map(_is_cheap, value.values())),
    ),
    **dict.fromkeys(
        ("items", "additionalProperties", "anyOf"),
        lambda value: all(map(_is_cheap, value if isinstance(value, list) else [value])),
    ),
    "$ref": lambda value: str(value).startswith("#"),
}
# Keywords that must be alone in a schema, else both are to be followed.
_ALONE = ("anyOf", "$ref")

_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.\deE]+)')
_MULTIPLES = 1_000_000


class TooHard(Exception):
    """A grammar takes too much time or memory."""


def _is_bomb(text: str) -> bool:
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


def tried(work: Callable[..., _T], text: str, *args: Any) -> _T:
    """What a function makes of a schema as JSON, or a grammar, in a child process unless it is
    cheap. Raises TooHard if that takes too much time or memory; Stopped if nobody waits for it any
    more."""
    if _is_bomb(text):
        raise TooHard
    if _is_cheap_text(text):
        return work(text, *args)
    given_up = GIVEN_UP.get()
    while not _PLACES.acquire(timeout=0.05):
        require_uncancelled(given_up)
    try:
        return run_in_child(work, text, *args, cancel=given_up, memory=MEMORY, seconds=SECONDS)
    except (MemoryError, TimeoutError, ChildEnded):
        raise TooHard from None
    finally:
        _PLACES.release()


def _is_cheap_text(text: str) -> bool:
    if len(text) > _SHORT:
        return False
    try:
        return _is_cheap(from_json(text))
    except (ValueError, RecursionError):
        return False


def _is_cheap(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    said = {*schema} - {*_ABOUT, *_PARTS}
    if len(said) > 1 and not said.isdisjoint(_ALONE):
        return False
    return all(key in _CHEAP and _CHEAP[key](value) for key, value in schema.items())
