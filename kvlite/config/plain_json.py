"""JSON that comes from others: read here alone, so that all of it can be said back.

Python takes numbers that JSON does not have (NaN, 1e999 as infinity) and halves of characters
(`\\ud800`), which break whatever writes them later.
"""

import json
import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

# Members of a list or an object; and of lists of tokens, in the fields that have them.
MOST, MOST_TOKENS = 20_000, 1_000_000
# Digits of a whole number: more are none that a program could take.
_DIGITS = 300
# Fields with text for a model: half a character there, which JavaScript leaves where it cuts an
# emoji, becomes U+FFFD, as in a decoder.
_TEXTS = frozenset({"messages", "prompt", "content", "input", "instructions", "text", "question"})


class NotPlain(ValueError):
    """A part of a JSON text cannot be taken.

    Attributes:
        field: of the whole, where it is; "" for the whole.
    """

    def __init__(self, where: str, said: str) -> None:
        super().__init__(f"{where or 'it'} {said}"[:400])
        self.field = where.partition(".")[0].partition("[")[0]


class _Wrong:
    """A number that cannot be said back."""

    def __init__(self, said: str) -> None:
        self.said = said


def read_json(text: str, tokens: Collection[str] = ()) -> Any:
    """What a JSON text says. `tokens` are fields with lists of tokens.

    Numbers and objects are made by Python's own functions, so that other threads go on meanwhile.

    Raises:
        NotPlain: a number is none of JSON's, or too long; a character is half of one; or a list has
            too many members. It names the field.
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        value = json.loads(
            text,
            parse_int=_whole,
            parse_float=_number,
            parse_constant=lambda word: _Wrong(f"is {word}, which is not a number in JSON"),
            object_pairs_hook=lambda pairs: dict(pairs),
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    whole = {"": value}
    _require_plain(whole, tokens, halves="\\ud" in text or "\\uD" in text or not _is_utf8(text))
    return whole[""]


def _whole(digits: str) -> Any:
    if len(digits) > _DIGITS:
        return _Wrong(f"has a number of {len(digits):,} digits: give {_DIGITS} at most")
    return int(digits)


def _number(written: str) -> Any:
    value = float(written)
    return value if math.isfinite(value) else _Wrong(f"is {written[:20]}, too large for a number")


def _require_plain(whole: dict[str, Any], tokens: Collection[str], *, halves: bool) -> None:
    """Raises NotPlain; replaces halves of characters in texts for a model."""
    left = deque[tuple[Any, str, bool]]([(whole, "", False)])
    while left:
        each, where, is_text = left.popleft()
        is_object = isinstance(each, dict)
        most = MOST_TOKENS if where.partition("[")[0] in tokens else MOST
        if len(each) > most:
            raise NotPlain(where, f"has {len(each):,} members: {most:,} at most")
        members: Iterable[tuple[Any, Any]] = each.items() if is_object else enumerate(each)
        for key, value in members:
            kind = type(value)
            if halves and is_object and not _is_utf8(key):
                raise NotPlain(where, "has a name with half a character (a lone surrogate)")
            if kind is str:
                if halves and not _is_utf8(value):
                    if not (is_text or key in _TEXTS):
                        said = "has half a character (a lone surrogate): send whole ones"
                        raise NotPlain(_at(where, key), said)
                    each[key] = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            elif kind is dict or kind is list:
                left.append((value, _at(where, key), is_text or key in _TEXTS))
            elif kind is _Wrong:
                raise NotPlain(_at(where, key), value.said)


def _at(where: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{where}[{key}]"
    key = key[:60].encode("utf-8", "replace").decode()
    return f"{where}.{key}"[-200:] if where else key


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
