"""What the style sheets of a page hide, by rules for one name, class or id."""

import re
from collections.abc import Mapping

_LARGEST = 2**20
_NOT_RULES = re.compile(r"(?s)/\*.*?\*/|@[^{};]*(?:;|\{(?:[^{}]*\{[^{}]*\})*[^{}]*\})")
_RULE = re.compile(r"([^{}]{1,10000})\{([^{}]*)\}")
_SIMPLE = re.compile(r"[a-z][a-z0-9]*|[a-z0-9]*[.#][\w-]+", re.I)
_SHOWS = re.compile(r"(?i)(?:^|;)\s*(display|visibility)\s*:\s*([a-z-]+)")
_HIDING = frozenset(("none", "hidden", "collapse"))


class StyleSheet:
    """The sheets of a page so far."""

    def __init__(self) -> None:
        self._pieces: list[str] | None = None
        self._hidden = dict[str, dict[str, bool]]()

    def begin(self) -> None:
        """Enter a sheet."""
        self._pieces = []

    def data(self, text: str) -> None:
        """Add text, if a sheet is open."""
        if self._pieces is not None:
            self._pieces.append(text)

    def end(self) -> None:
        """Leave a sheet."""
        text = _NOT_RULES.sub("", "".join(self._pieces or ())[:_LARGEST])
        self._pieces = None
        for selectors, declared in _RULE.findall(text):
            if found := _hiding(declared):
                for selector in selectors.split(","):
                    if _SIMPLE.fullmatch(selector.strip()):
                        self._hidden.setdefault(selector.strip().lower(), {}).update(found)

    def hides(self, name: str, attributes: Mapping[str, str]) -> bool:
        """Whether an element is hidden by its own style, or else by the sheets."""
        own = _hiding(attributes.get("style", ""))
        if not self._hidden:
            return any(own.values())
        marks = [f".{each}" for each in attributes.get("class", "").lower().split()]
        marks += [f"#{attributes['id'].lower()}"] if "id" in attributes else []
        found = dict[str, bool]()
        for selector in (name, *marks, *(name + mark for mark in marks)):
            found.update(self._hidden.get(selector, {}))
        return any({**found, **own}.values())


def _hiding(declared: str) -> dict[str, bool]:
    """Which properties hide an element, of those that could."""
    return {name.lower(): value.lower() in _HIDING for name, value in _SHOWS.findall(declared)}
