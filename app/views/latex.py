"""Formulas between dollars, told from prices."""

import re

# Code, which stays; or a formula, which begins and ends at its dollars and not before a digit, as
# Pandoc has it: "$5 and $6" is none.
_FORMULA = re.compile(
    r"(?P<code>```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|(?P<ticks>`+)[^`].*?(?P=ticks))"
    r"|(?<![\\$\w])\$(?=[^\s$])(?P<formula>[^$\n]*[^\s$\\])\$(?![\w$])",
    re.DOTALL,
)


def formulas(text: str) -> str:
    r"""A text in Markdown with `\(` and `\)` in the place of single dollars around formulas."""
    if text.count("$") < 2:
        return text
    return _FORMULA.sub(_told_apart, text)


def _told_apart(found: re.Match[str]) -> str:
    formula = found["formula"]
    return found[0] if formula is None else rf"\({formula}\)"
