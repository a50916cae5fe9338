"""What tuning on a document has found."""

from collections.abc import Mapping
from html import escape
from typing import Any

from kvlite.bench.fork import NO_RECALL

from ..form import label_of

# Columns of `kvlite tune`, in the words of the page.
_COLUMNS = {
    "method": "Method",
    "budget": "Keeps",
    "KV": "Memory",
    "facts known": "Facts",
    "nats lost": "Lost",
    "ms a token": "ms a token",
}


def tuned_html(found: Mapping[str, Any]) -> str:
    """The settings that are proposed, why, and what no other choice beats; "" if there are none."""
    if not found:
        return ""
    values = "".join(
        f"<tr><th scope=row>{escape(label_of(name))}</th><td>{escape(str(value))}</td></tr>"
        for name, value in found["values"].items()
    )
    head = "".join(f"<th scope=col>{escape(each)}</th>" for each in _COLUMNS.values())
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(line, name))}</td>' for name in _COLUMNS)}</tr>"
        for line in found["lines"]
    )
    return (
        f'<div class="account"><h3>Proposed for {escape(found["brief"])}</h3>'
        f"<table>{values}</table><p>{escape(found['told'][0])}</p>"
        "<details><summary>What was measured</summary>"
        "<p>What no other choice beats both in memory and in what it loses. Facts: the hidden "
        "ones that it knows. Lost: nats a token, beside keeping everything.</p>"
        f'<table class="measured"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        "</details></div>"
    )


def _cell(line: Mapping[str, str], name: str) -> str:
    recall = line["recall"] if name == "method" else NO_RECALL
    return line[name] + ("" if recall == NO_RECALL else f", recall {recall}")
