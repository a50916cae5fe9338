"""A conversation of the library as a file for people or programs, with its answers' sources."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvlite.conversation.library import Library
from kvlite.conversation.record import Record, keys_of

# What an account has of a source beyond this is the document around it.
_SOURCE = ("document", "page", "where", "start", "end", "text")


def as_markdown(record: Record, library: Library) -> str:
    """What was said, for people."""
    lines = [f"# {record.title}", ""]
    for each, sources in zip(record.said, _sources(record, library), strict=True):
        lines += [f"**{'You' if each.role == 'user' else record.model or 'Model'}**", ""]
        lines += [f"*About {', '.join(each.documents)}*", ""] if each.documents else []
        lines += [each.text.strip(), ""]
        lines += [
            f"{number}. {source['document']}, {source['where']}: \u201c{source['text']}\u201d"
            for number, source in enumerate(sources, 1)
        ]
        lines += [""] if sources else []
    return "\n".join(lines)


def as_json(record: Record, library: Library) -> str:
    """All of its record; answers have `sources` where there are some."""
    plain = asdict(record)
    for each, sources in zip(plain["said"], _sources(record, library), strict=True):
        if sources:
            each["sources"] = [{name: one.get(name) for name in _SOURCE} for one in sources]
    return json.dumps(plain, ensure_ascii=False, indent=1)


def _sources(record: Record, library: Library) -> list[Sequence[Mapping[str, Any]]]:
    """The sources of each message."""
    accounts = (library.account(record.id, key) for key in keys_of(record.said))
    return [account.get("sources", ()) for account in accounts]
