"""The passages that an answer came from, as numbered chips below it that open in place."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .markdown import BREAK

# Characters shown of a document before a passage, and as many behind it.
_AROUND = 1_000
# What begins a formula wherever the page's chat finds it.
_FORMULA = re.compile(r"[$\\]")


def sources_html(sources: Sequence[Mapping[str, Any]], key: str) -> str:
    """The sources in the account of an answer, of which at most one is open at a time; `key` tells
    the answer from others. It is one line, in which nothing is Markdown."""
    chips = "".join(_chip(number, each, key) for number, each in enumerate(sources, 1))
    return f'<div class="sources">{chips}</div>'


def _chip(number: int, source: Mapping[str, Any], key: str) -> str:
    place = _inert(f"{source['document']}, {source['where']}")
    before, after = _inert(source["before"][-_AROUND:]), _inert(source["after"][:_AROUND])
    return (
        f'<details class="source" name="sources-{key}"><summary><b>{number}</b> {place}</summary>'
        f'<div class="document" tabindex="0">{before}<mark>{_inert(source["passage"])}</mark>'
        f"{after}</div></details>"
    )


def _inert(text: str) -> str:
    """Text as HTML in one line, without formulas."""
    return escape(_FORMULA.sub(rf"\g<0>{BREAK}", text)).replace("\n", "&#10;")
