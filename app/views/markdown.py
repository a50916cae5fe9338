"""Markdown for the browser: formulas that it renders, and nothing that it would fetch.

Gradio removes scripts from what it shows, but an image in Markdown or HTML is a request to any
address, and can carry anything along. Here it becomes text. The page's content policy would refuse
it all the same.
"""

import re

from markdown_it import MarkdownIt

# Code, which stays; or a formula. Its dollars have no space inside and no digit behind, as in
# Pandoc: "$5 and $6" has none.
_FORMULA = re.compile(
    r"(?P<code>```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|(?P<ticks>`+)[^`].*?(?P=ticks))"
    r"|(?<![\\$\w])\$(?=[^\s$])(?P<formula>[^$\n]*[^\s$\\])\$(?![\w$])",
    re.DOTALL,
)
_LOADS = (
    "img image picture source video audio track iframe frame embed object applet link script style "
    "svg math base meta form input button textarea select template portal"
)
_LOADING = re.compile(rf"<(?=/?(?:{'|'.join(_LOADS.split())})\b)|!(?=\[)", re.IGNORECASE)
# Invisible, but enough to break either.
BREAK = "\u2060"
_BLOCKS = MarkdownIt("commonmark").disable("inline")
# Characters in which blocks of code are found in half a second at worst.
_SHORT = 100_000


def formulas(text: str) -> str:
    r"""Markdown with `\(` and `\)` in the place of single dollars around formulas."""
    if text.count("$") < 2:
        return text
    return _FORMULA.sub(
        lambda found: rf"\({found['formula']}\)" if found["formula"] else found[0], text
    )


def sanitized(text: str) -> str:
    """Markdown that shows as it did, except that what would be loaded shows as its source. Blocks
    of code stay as they are, unless the text is very long."""
    if not _LOADING.search(text):
        return text
    if len(text) > _SHORT:
        return _broken(text)
    code = {
        number
        for token in _BLOCKS.parse(text)
        if token.type == "fence" and token.map is not None and not token.level
        for number in range(*token.map)
    }
    # Lines as Markdown has them, and what ends each.
    parts = re.split(r"(\r\n|\r|\n)", text)
    return "".join(
        part if number // 2 in code else _broken(part) for number, part in enumerate(parts)
    )


def _broken(text: str) -> str:
    return _LOADING.sub(rf"\g<0>{BREAK}", text)
