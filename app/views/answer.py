"""What an answer was made from, as a picture."""

from collections.abc import Mapping
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
    """What the cache held for an answer; its sources and figures are below it."""
    if not account:
        return '<p class="quiet">Click on an answer to see what it was made from.</p>'
    asked = account.get("question")  # which accounts of earlier versions lack
    head = f"<h2>Answer to \u201c{escape(asked)}\u201d</h2>" if asked else ""
    kept = _kept(account["kept"]) if account.get("kept") else f"<p>{escape(account['brief'])}</p>"
    return f'<div class="account">{head}{kept}</div>'


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
