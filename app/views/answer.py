"""What an answer was made from, in sentences and pictures."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvlite.conversation.metrics import GenerationMetrics
from kvlite.conversation.verify import difference
from kvlite.errors import SnapshotError

from ..engine.kept import KeptMap
from .kept_map import draw_kept

_KEPT = (
    "A line for each layer of the model, from the beginning of the conversation to its end: the "
    "stronger the color, the more the layer still holds of that part."
)


def answer_html(account: Mapping[str, Any]) -> str:
    """The account of an answer."""
    if not account:
        return '<p class="quiet">Click on an answer to see what it was made from.</p>'
    asked = account.get("question")  # which accounts of earlier versions lack
    head = f"<h2>Answer to \u201c{escape(asked)}\u201d</h2>" if asked else ""
    facts = account.get("facts", ())
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in facts
    )
    told = f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in account['told'])}</ul>"
    details = _kept(account["kept"]) if account.get("kept") else ""
    if facts:
        told, details = f"<table>{rows}</table>", told + details
    if details:
        details = f"<details><summary>Details</summary>{details}</details>"
    sources = _sources(account.get("sources", ()))
    return f'<div class="account">{head}{sources}{told}{details}</div>'


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    if not sources:
        return ""
    return f"<h3>Where it came from</h3>{''.join(map(_source, sources))}"


def _source(source: Mapping[str, Any]) -> str:
    quoted, place = escape(source["text"]), escape(f"{source['document']}, {source['where']}")
    before, passage, after = (escape(source[name]) for name in ("before", "passage", "after"))
    return (
        f'<details class="source"><summary><q>{quoted}</q> <cite>{place}</cite></summary>'
        f'<div class="document" tabindex="0">{before}<mark>{passage}</mark>{after}</div></details>'
    )


def _kept(kept: Any) -> str:
    try:
        picture = draw_kept(KeptMap.from_json(kept))
    except SnapshotError as error:
        return f"<p>{escape(str(error))}</p>"
    return f"<p>{_KEPT}</p><figure><figcaption>What each layer holds</figcaption>{picture}</figure>"


def difference_html(former: str, exact: str, metrics: GenerationMetrics) -> str:
    """How an answer differs from the one made from everything."""
    if metrics.finish_reason in ("interrupted", "memory"):
        return (
            '<div class="checked"><p>It was not finished, so it says nothing about the answer.</p>'
            "</div>"
        )
    kept, seen = metrics.kept_entries_mean, metrics.seen_tokens
    source = f"all {seen:,} tokens" if kept >= seen else f"{kept:,.0f} of {seen:,} tokens"
    runs = difference(former, exact)
    if all(kind == "both" for kind, _ in runs):
        return f'<div class="checked"><p><b>The same answer</b> from {source}.</p></div>'
    tags = {"both": "span", "one": "del", "other": "ins"}
    words = "".join(f"<{tags[kind]}>{escape(text)}</{tags[kind]}>" for kind, text in runs)
    return (
        f'<div class="checked"><p><b>It differs</b> from the answer from {source}: '
        f"<del>only here</del>, <ins>only there</ins>.</p><blockquote>{words}</blockquote></div>"
    )
