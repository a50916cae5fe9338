"""What the style sheet of a page hides, by rules for one name, class or id."""

import re
from collections.abc import Mapping

_LARGEST = 2**20
_NOT_RULES = re.compile(r"(?s)/\*.*?\*/|@[^{};]*(?:;|\{(?:[^{}]*\{[^{}]*\})*[^{}]*\})")
_RULE = re.compile(r"([^{}]{1,10000})\{([^{}]*)\}")
_SIMPLE = re.compile(r"[a-z][a-z0-9]*|[a-z0-9]*[.#][\w-]+", re.I)
_SHOWS = re.compile(r"(?i)(?:^|;)\s*(display|visibility)\s*:\s*([a-z-]+)")
_HIDING = frozenset(("none", "hidden", "collapse"))


class StyleSheet:
    """The rules of a sheet that hide something, or show it again."""

    def __init__(self, sheet: str) -> None:
        self._hidden = dict[str, dict[str, bool]]()
        for selectors, declared in _RULE.findall(_NOT_RULES.sub("", sheet[:_LARGEST])):
            if found := _hiding(declared):
                for selector in selectors.split(","):
                    if _SIMPLE.fullmatch(selector.strip()):
                        self._hidden.setdefault(selector.strip().lower(), {}).update(found)

    def hides(self, name: str, attributes: Mapping[str, str]) -> bool:
        """Whether an element is hidden by its own style, or else by the sheet."""
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
