"""A conversation as the page's chat shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..storage.record import Record, StoredMessage, keys_of
from ..storage.store import ConversationStore
from .latex import formulas
from .sanitize import sanitized

Message = dict[str, Any]
# Messages of a long conversation that are shown until all are asked for: a browser draws all that
# are there anew whenever an answer has grown. So many more make no difference.
LATEST, MORE = 40, 4


@dataclass(frozen=True)
class History:
    """Messages in the chat's own form, and what each belongs to.

    Attributes:
        messages: as gradio takes them.
        numbers: for each, the user's message it belongs to, counted from 1; 0 before the first.
        keys: for each, the key of the account that there may be of the answer; "" of what is none.
        before: how many of the user's there are before these.
    """

    messages: list[Message]
    numbers: list[int]
    keys: list[str]
    before: int = 0

    def answer_keys(self) -> list[str]:
        """Of all answers, in order."""
        return list(dict.fromkeys(filter(None, self.keys)))


def history(record: Record, store: ConversationStore, start: int = 0) -> History:
    """What was said, each answer with its account under it.

    Args:
        start: messages that are left out, the first ones.
    """
    number = before = sum(each.role == "user" for each in record.said[:start])
    found = History([], [], [], before)
    keys = keys_of(record.said)
    for said, own in zip(record.said[start:], keys[start:], strict=True):
        number += said.role == "user"
        key = "" if said.role == "user" else own
        for message in _of(said, store.account(record.id, key) if key else {}):
            _add(found, message, number, key)
    if record.draft:
        for message in _of(StoredMessage("user", record.draft, tuple(record.waiting)), {}):
            _add(found, message, number + 1, "")
    elif record.waiting:
        _add(found, _notice(f"Read: {', '.join(record.waiting)}", ""), number, "")
    return found


def start_of(said: Sequence[StoredMessage], former: int | None = None) -> int:
    """How many messages to leave out: of a long conversation only the latest are shown, from one of
    the user's on.

    Args:
        former: how many were left out before; if many more were shown than that, someone asked for
            them.
    """
    start = max(0, len(said) - LATEST)
    while start and said[start].role != "user":
        start -= 1
    if former is None or former >= start or len(said) - former <= LATEST + MORE:
        return start
    return former


def _of(said: StoredMessage, account: Mapping[str, Any]) -> Sequence[Message]:
    if said.role == "user":
        about = [_notice(f"About {', '.join(said.documents)}", "")] if said.documents else []
        return [*about, {"role": "user", "content": sanitized(said.text)}]
    answer = answered(said.text)
    if not account:
        return [answer]
    return [answer, _notice(account["brief"], "\n\n".join(account["told"]))]


def answered(text: str) -> Message:
    """An answer, or what there is of it."""
    return {"role": "assistant", "content": sanitized(formulas(text))}


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
