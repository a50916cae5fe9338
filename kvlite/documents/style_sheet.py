"""What styles of a page hide, raise or strike through, by rules for one name, class or id."""

import re
from collections.abc import Mapping

_LARGEST = 2**20
_NOT_RULES = re.compile(r"(?s)/\*.*?\*/|@[^{};]*(?:;|\{(?:[^{}]*\{[^{}]*\})*[^{}]*\})")
_RULE = re.compile(r"([^{}]{1,10000})\{([^{}]*)\}")
_SIMPLE = re.compile(r"[a-z][a-z0-9]*|[a-z0-9]*[.#][\w-]+", re.I)
_SHOWS = re.compile(
    r"(?i)(?:^|;)\s*(display|visibility|vertical-align|text-decoration)(?:-line)?\s*:\s*([a-z -]+)"
)
# The first that a style says.
_EFFECTS = {
    "display none": "hidden",
    "visibility hidden": "hidden",
    "visibility collapse": "hidden",
    "vertical-align super": "sup",
    "vertical-align sub": "sub",
    "text-decoration line-through": "del",
}


class StyleSheet:
    """The rules of a sheet that have such effects, or take them back."""

    def __init__(self, sheet: str) -> None:
        self._rules = dict[str, dict[str, str]]()
        for selectors, declared in _RULE.findall(_NOT_RULES.sub("", sheet[:_LARGEST])):
            if found := _shown(declared):
                for selector in selectors.split(","):
                    if _SIMPLE.fullmatch(selector.strip()):
                        self._rules.setdefault(selector.strip().lower(), {}).update(found)

    def effect(self, name: str, attributes: Mapping[str, str]) -> str:
        """What an element is by its own style, or else by the sheet: "hidden", or an element of
        HTML such as "sup"; "" if it is as usual."""
        found = dict[str, str]()
        if self._rules:
            marks = [f".{each}" for each in attributes.get("class", "").lower().split()]
            marks += [f"#{attributes['id'].lower()}"] if "id" in attributes else []
            for selector in (name, *marks, *(name + mark for mark in marks)):
                found.update(self._rules.get(selector, {}))
        found.update(_shown(attributes.get("style", "")))
        said = {f"{each} {word}" for each, value in found.items() for word in value.split()}
        return next((effect for style, effect in _EFFECTS.items() if style in said), "")


def _shown(declared: str) -> dict[str, str]:
    """The properties that could have an effect."""
    return {name.lower(): value.lower() for name, value in _SHOWS.findall(declared)}
