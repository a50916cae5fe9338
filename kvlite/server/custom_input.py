"""The input of a custom tool, read out of the JSON arguments of the function that stands for it."""

import re

from kvlite.config.checked_file import Damaged, from_json

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Pieces of a JSON string that are whole; an escape that JSON does not have is what it looks like.
_PIECE = re.compile(
    r'(?P<plain>[^"\\]+)|\\u(?P<code>[0-9a-fA-F]{4})|\\(?P<sign>[^u])|'
    r"(?P<odd>\\u)(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])"
)
_SIGNS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


class CustomInput:
    """Reads arguments as they come. A model that is not held to them may write others: what has no
    such input first is read once all of it is there."""

    def __init__(self) -> None:
        self._held, self._half = "", ""
        self._is_open = self._has_ended = False

    def push(self, arguments: str) -> str:
        """What is certain of the input with more of the arguments."""
        if self._has_ended:
            return ""
        self._held += arguments
        if not self._is_open:
            if (opening := _OPENING.match(self._held)) is None:
                return ""
            self._is_open, self._held = True, self._held[opening.end() :]
        made, at = [self._half], 0
        while (found := _PIECE.match(self._held, at)) is not None:
            made.append(_text(found))
            at = found.end()
        self._has_ended = self._held.startswith('"', at)
        self._held = self._held[at:]
        return self._without_half("".join(made))

    def flush(self) -> str:
        """The rest, at the end of the arguments, wherever that is."""
        if self._is_open:
            return _whole(self._half)
        try:
            found = from_json(self._held)
        except Damaged:
            begins = '{"input":"'.startswith("".join(self._held.split()))
            return "" if begins else self._held
        given = found.get("input") if isinstance(found, dict) else found
        return _whole(given) if isinstance(given, str) else self._held

    def _without_half(self, text: str) -> str:
        """Text but for the first half of a character that two escapes make, which is kept."""
        is_half = "\ud800" <= text[-1:] <= "\udbff"
        self._half = text[-1:] if is_half else ""
        return _whole(text[:-1] if is_half else text)


def _text(found: re.Match[str]) -> str:
    if (code := found["code"]) is not None:
        return chr(int(code, 16))
    if (sign := found["sign"]) is not None:
        return _SIGNS.get(sign, f"\\{sign}")
    return found[0]


def _whole(text: str) -> str:
    """Text whose halves of characters are joined; those without another are replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
