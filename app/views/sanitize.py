"""Answers and messages that cannot make a browser fetch anything.

Gradio removes scripts from what it shows, but an image in Markdown or HTML is a request to wherever
its address says, with whatever the address tells. Here it becomes text. The page's content policy
would refuse it all the same.
"""

import re

from markdown_it import MarkdownIt

_LOADS = (
    "img image picture source video audio track iframe frame embed object applet link script style "
    "svg math base meta form input button textarea select template portal"
)
_LOADING = re.compile(rf"<(?=/?(?:{'|'.join(_LOADS.split())})\b)|!(?=\[)", re.IGNORECASE)
# Seen by nobody, and enough that neither is what it was.
_BREAK = "\u2060"
_BLOCKS = MarkdownIt("commonmark").disable("inline")
# Characters in which blocks of code are found in half a second at worst.
_SHORT = 100_000


def sanitized(text: str) -> str:
    """A text in Markdown that shows as it did, but for what would be loaded, which shows as its
    own source. Blocks of code stay to the letter, but in a text that is very long."""
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
    return _LOADING.sub(rf"\g<0>{_BREAK}", text)
