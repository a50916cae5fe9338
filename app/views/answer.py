"""What an answer was made from, in sentences and pictures."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from kvlite.conversation.metrics import GenerationMetrics
from kvlite.conversation.verify import difference
from kvlite.errors import SnapshotError
from kvlite.model.calibration import Calibration

from ..engine.kept import KeptMap
from ..engine.pages import PageShare
from .pictures import draw_heads, draw_kept, draw_pages


def answer_html(account: Mapping[str, Any], calibration: Calibration | None) -> str:
    """The account of an answer, with a picture of the model's heads if it has a calibration."""
    if not account:
        return '<p class="quiet">Click on an answer to see what it was made from.</p>'
    asked = account.get("question")  # which accounts of earlier versions lack
    head = f"<h4>Answer to “{escape(asked)}”</h4>" if asked else ""
    told = "".join(f"<li>{escape(each)}</li>" for each in account["told"])
    pictures = "".join(_pictures(account, calibration))
    return f'<div class="account">{head}{pictures}<ul>{told}</ul></div>'


def _pictures(account: Mapping[str, Any], calibration: Calibration | None) -> Iterator[str]:
    if pages := [PageShare(**each) for each in account.get("pages", ())]:
        yield _figure("Pages it was made from", draw_pages(pages))
    if kept := account.get("kept"):
        try:
            yield _figure("What each layer holds", draw_kept(KeptMap.from_json(kept)))
        except SnapshotError as error:
            yield f"<p>{escape(str(error))}</p>"
    if calibration is not None:
        yield (
            "<details><summary>Effective rank of the model's heads (UNComp)</summary>"
            f"{draw_heads(calibration)}</details>"
        )


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


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
