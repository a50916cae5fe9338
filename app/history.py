"""A conversation as the page's chat shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .inert import inert
from .record import Record, Said, keys_of
from .shelf import Shelf

Message = dict[str, Any]


@dataclass(frozen=True)
class History:
    """Messages in the chat's own form, and what each belongs to.

    Attributes:
        messages: as gradio takes them.
        numbers: for each, the user's message it belongs to, counted from 1; 0 before the first.
        keys: for each, the key of the answer's account; "" where there is none.
    """

    messages: list[Message]
    numbers: list[int]
    keys: list[str]

    def answer_keys(self) -> list[str]:
        """Of all answers that have an account, in order."""
        return list(dict.fromkeys(filter(None, self.keys)))


def history(record: Record, shelf: Shelf) -> History:
    """All that was said, each answer with its account under it."""
    found = History([], [], [])
    number = 0
    for said, own in zip(record.said, keys_of(record.said), strict=True):
        number += said.role == "user"
        key = "" if said.role == "user" else own
        for message in _of(said, shelf.account(record.id, key) if key else {}):
            _add(found, message, number, key)
    if record.draft and not _is_said(record):
        for message in _of(Said("user", record.draft, tuple(record.waiting)), {}):
            _add(found, message, number + 1, "")
    elif record.waiting:
        _add(found, _notice(f"Read: {', '.join(record.waiting)}", ""), number, "")
    return found


def _is_said(record: Record) -> bool:
    last = [each.text for each in record.said if each.role == "user"][-1:]
    return last == [record.draft]


def _of(said: Said, account: Mapping[str, Any]) -> Sequence[Message]:
    if said.role == "user":
        about = [_notice(f"About {', '.join(said.documents)}", "")] if said.documents else []
        return [*about, {"role": "user", "content": inert(said.text)}]
    answer = {"role": "assistant", "content": inert(said.text)}
    if not account:
        return [answer]
    return [answer, _notice(account["brief"], "\n\n".join(account["told"]))]


def _notice(title: str, content: str) -> Message:
    """What kvlite says, which opens at a click."""
    return {
        "role": "assistant",
        "content": content,
        "metadata": {"title": title, "status": "done"},
    }


def _add(found: History, message: Message, number: int, key: str) -> None:
    found.messages.append(message)
    found.numbers.append(number)
    found.keys.append(key)
