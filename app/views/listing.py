"""The list of conversations; `list.js` hands on what is clicked in it."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date, timedelta
from html import escape
from itertools import groupby

from kvlite.conversation.library import Deleted
from kvlite.conversation.record import SERVER, Record

# What may be done with a conversation: the name of its hidden button, and in words.
ACTIONS = {
    "rename": "Rename",
    "markdown": "Export as Markdown",
    "json": "Export as JSON",
    "delete": "Delete",
}
# Opened by `list.js` beside a row, for the conversation of that row.
MENU_HTML = (
    '<div id="row-menu" popover role="menu">'
    + "".join(
        f'<button type="button" role="menuitem" tabindex="-1" data-do="{name}">{label}</button>'
        for name, label in ACTIONS.items()
    )
    + '</div><dialog id="rename" aria-labelledby="rename-label"><form method="dialog">'
    '<label id="rename-label" for="rename-name">Name of the conversation</label>'
    '<input id="rename-name" maxlength="200" autocomplete="off">'
    '<p><button type="button">Cancel</button>'
    '<button value="rename" class="main">Rename</button></p></form></dialog>'
)

# What is no conversation that somebody typed here.
_KINDS = {"document": "<small>document</small>", SERVER: "<small>program</small>", "": ""}


def listing_html(
    records: Sequence[Record],
    busy: Collection[str] = (),
    deleted: Deleted | None = None,
    query: str = "",
) -> str:
    """Conversations by the day they were used last.

    Args:
        busy: the ids of those that something is being done for.
        deleted: what can be restored.
        query: what was searched for.
    """
    asked = " ".join(query.split())
    none = (
        f"<p>No conversation has \u201c{escape(asked)}\u201d.</p>" if asked and not records else ""
    )
    today = date.today()
    groups = groupby(records, key=lambda each: _day(date.fromtimestamp(each.used), today))
    return _undo(deleted) + none + "".join(_group(day, of_day, busy) for day, of_day in groups)


def _undo(deleted: Deleted | None) -> str:
    if deleted is None:
        return ""
    return (
        f'<p class="undo" role="status"><span>Deleted \u201c{escape(deleted.title)}\u201d</span>'
        f'<button type="button" data-do="restore" data-id="{deleted.id}">Undo</button></p>'
    )


def _group(day: str, records: Iterable[Record], busy: Collection[str]) -> str:
    rows = "".join(_rows(records, busy))
    return f"<section><h2>{day}</h2><ul>{rows}</ul></section>"


def _rows(records: Iterable[Record], busy: Collection[str]) -> Iterator[str]:
    for each in records:
        title = escape(each.title)
        kind = _KINDS["document" if each.is_document else each.made_by]
        sign = '<i class="busy" role="img" aria-label="being answered"></i>'
        yield (
            f'<li data-id="{each.id}"><button type="button" class="open" title="{title}">'
            f"<span>{title}</span>{kind}{sign if each.id in busy else ''}</button>"
            '<button type="button" class="more" aria-haspopup="menu" '
            f'aria-label="Rename, export or delete {title}">\u22ef</button></li>'
        )


def _day(used: date, today: date) -> str:
    if used >= today:
        return "Today"
    if used == today - timedelta(days=1):
        return "Yesterday"
    return "The last 7 days" if used > today - timedelta(days=7) else "Earlier"
