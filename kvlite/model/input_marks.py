"""Digits put into and around what is said before a chat template renders it.

A control token spelled in a text would end a turn. Digits inside it make it one no more, and no
template changes digits, whatever else it does to a text: trims it, quotes it, escapes it, changes
its case. So the places are found again in the rendering, which then goes on without them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlite.config.plain_json import read_json

# What keys mean below an object of a message, a call, a tool or a schema.
_FIXED = frozenset({"role", "type", "format", "id", "tool_call_id"})  # templates compare these
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties"})
_DATA = frozenset({"arguments", "default", "enum", "const", "examples"})
_WORDS = frozenset(
    {
        "role", "content", "name", "type", "id", "tool_calls", "tool_call_id", "function",
        "arguments", "parameters", "description", "strict", "reasoning_content", "reasoning",
        "thinking", "return", "properties", "required", "items", "enum", "const", "title",
        "default", "examples", "format", "pattern", "nullable", "anyOf", "oneOf", "allOf", "not",
        "if", "then", "else", "$ref", "$defs", "$schema", "definitions", "patternProperties",
        "additionalProperties", "propertyNames", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
        "uniqueItems", "prefixItems", "contains", "minProperties", "maxProperties", "deprecated",
        "readOnly", "writeOnly", "$id",
    }
)  # fmt: skip
Change = Callable[[str], str]


@dataclass(frozen=True)
class Rendering:
    """What a template made of a conversation.

    Attributes:
        spans: where something said stands, ascending; where it begins and ends at one place, that
            is inside something said.
        shown: the texts that are there as a whole.
    """

    text: str
    spans: list[tuple[int, int]]
    shown: frozenset[str] = frozenset()

    def until(self, text: str) -> "Rendering | None":
        """All up to the end of a text, where it stands last; None if it isn't there."""
        if (end := self.text.rfind(text.strip()) + len(text.strip())) < len(text.strip()):
            return None
        tail = text[len(text.rstrip()) :]
        end += len(tail) if self.text.startswith(tail, end) else 0
        spans = [(begin, min(last, end)) for begin, last in self.spans if begin < end]
        return Rendering(self.text[:end], spans, self.shown)

    def after(self, text: str) -> "Rendering":
        """What follows a text; nothing if it isn't there."""
        at = self.text.find(text) + len(text)
        if at < len(text):
            return Rendering("", [])
        rest = [(max(begin - at, 0), end - at) for begin, end in self.spans if end > at]
        return Rendering(self.text[at:], rest, self.shown)


class InputMarks:
    """Marks for the texts of one conversation."""

    def __init__(self, controls: Iterable[str], *values: Any) -> None:
        """`controls` are spellings of the control tokens, `values` all that will be rendered."""
        self._lengths: dict[str, set[int]] = {}
        self._controls = {each.lower() for each in controls if len(each) > 1}
        for each in self._controls:
            self._lengths.setdefault(each[0], set()).add(len(each))
        first = "".join({*self._lengths} | {each.upper() for each in self._lengths})
        self._first = re.compile(f"[{re.escape(first)}]") if first else None
        said = json.dumps(values, ensure_ascii=False, default=str)
        # The first digit is there once, so that no mark begins inside another.
        digits = (f"4{number:08}" for number in range(91_735_208, 10**8, 10_007))
        self._digits = next(each for each in digits if "4" not in each[1:] and each not in said)
        self._numbers: dict[str, int] = {}

    def inside(self, value: Any) -> Any:
        """A value with a mark inside each control token that is spelled in it."""
        return _changed(value, self._broken, self._broken)

    def around(self, value: Any) -> Any:
        """As `inside`, and with marks around each text that is said, not only named."""
        return _changed(value, self._wrapped, self._broken)

    def found(self, rendered: str) -> Rendering:
        """A rendering without its marks, and where they were."""
        texts = [*self._numbers]
        pieces, at, before = list[str](), 0, 0
        spans, opened, shown = list[tuple[int, int]](), list[tuple[int, str]](), set[str]()
        for mark in re.finditer(f"{self._digits}(?:3|([12])([0-9]{{6}}))", rendered):
            pieces.append(rendered[at : mark.start()])
            before += len(pieces[-1])
            at = mark.end()
            if mark[1] == "1":
                opened.append((before, mark[2]))
            elif mark[1] and opened and opened[-1][1] == mark[2]:
                spans.append((opened.pop()[0], before))
                shown.add(texts[int(mark[2])])
            else:
                spans.append((before, before))
        spans += [(begin, begin) for begin, _ in opened]
        return Rendering("".join([*pieces, rendered[at:]]), _joined(spans), frozenset(shown))

    def _broken(self, text: str) -> str:
        if self._first is None:
            return text
        pieces, done = list[str](), 0
        for found in self._first.finditer(text):
            at = found.start()
            lengths = self._lengths[found[0].lower()]
            if any(text[at : at + length].lower() in self._controls for length in lengths):
                pieces += [text[done : at + 1], f"{self._digits}3"]
                done = at + 1
        return "".join([*pieces, text[done:]]) if pieces else text

    def _wrapped(self, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        begin = text.index(core)
        number = f"{self._numbers.setdefault(core, len(self._numbers)):06}"
        marked = f"{self._digits}1{number}{self._broken(core)}{self._digits}2{number}"
        return f"{text[:begin]}{marked}{text[begin + len(core) :]}"


def each_text(value: Any, change: Change) -> Any:
    """A copy of a value with all its texts and keys changed."""
    return _changed(value, change, change)


def texts_in(arguments: Any) -> list[str]:
    """All texts and keys of a call's arguments, also if these are one text, without white space
    around them."""
    found = list[str]()

    def note(text: str) -> str:
        found.append(text.strip())
        return text

    each_text({"arguments": arguments}, note)
    return [text for text in found[1:] if text]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    made = list[tuple[int, int]]()
    for begin, end in sorted(spans):
        if made and begin < made[-1][1]:
            made[-1] = (made[-1][0], max(end, made[-1][1]))
        elif not made or (begin, end) != made[-1]:
            made.append((begin, end))
    return made


def _changed(
    value: Any, said: Change, named: Change, kind: str = "words", free: bool = True
) -> Any:
    """A copy of a value with its texts changed.

    Args:
        said, named: what becomes of texts that are said, and of those that templates know.
        kind: whether keys are words that templates know, names, or ("data") said like all below.
        free: whether the texts are said.
    """
    if isinstance(value, str):
        return said(value) if free else named(value)
    if isinstance(value, list | tuple):
        return [_changed(each, said, named, kind, free) for each in value]
    if not isinstance(value, Mapping):
        return value
    made = dict[Any, Any]()
    for key, each in value.items():
        known = kind == "words" and key in _WORDS
        below = kind if kind == "data" else "words"
        if known:
            below = "names" if key in _NAMED else "data" if key in _DATA else "words"
        name = (named if known else said)(key) if isinstance(key, str) else key
        if key == "arguments" and kind == "words" and (parsed := object_in(each)) is not None:
            parsed = _changed(parsed, said, named, below)
            made[name] = json.dumps(parsed, ensure_ascii=False)
        else:
            made[name] = _changed(each, said, named, below, not (known and key in _FIXED))
    return made


def object_in(text: Any) -> dict[str, Any] | None:
    """The object that a text is as JSON, if it is one."""
    if not isinstance(text, str):
        return None
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
