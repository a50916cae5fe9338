"""A conversation as the page's chat shows it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..storage.record import Record, StoredMessage, keys_of
from ..storage.store import ConversationStore
from .markdown import formulas, sanitized

Message = dict[str, Any]
# How many messages of a long conversation are shown until all are asked for: a browser draws all of
# them whenever an answer has grown. So many more make no difference.
LATEST, MORE = 40, 4


@dataclass(frozen=True)
class History:
    """Messages as gradio takes them, and what each belongs to.

    Attributes:
        numbers: for each, the user's message it belongs to, counted from 1; 0 before the first.
        keys: for each, the key of the answer's account, if it has one; "" for what is no answer.
        before: how many of the user's messages come before these.
    """

    messages: list[Message]
    numbers: list[int]
    keys: list[str]
    before: int = 0

    def answer_keys(self) -> list[str]:
        """The keys of all answers, in order."""
        return list(dict.fromkeys(filter(None, self.keys)))


def history(record: Record, store: ConversationStore, start: int = 0) -> History:
    """What was said, each answer with its account below it, without the first `start` messages."""
    before = sum(each.role == "user" for each in record.said[:start])
    found = [*_entries(record, store, start, before)]
    return History(
        [message for message, _, _ in found],
        [number for _, number, _ in found],
        [key for _, _, key in found],
        before,
    )


def _entries(
    record: Record, store: ConversationStore, start: int, number: int
) -> Iterator[tuple[Message, int, str]]:
    keys = keys_of(record.said)
    for said, own in zip(record.said[start:], keys[start:], strict=True):
        if said.role == "user":
            number += 1
            yield from ((each, number, "") for each in _question(said.text, said.documents))
        else:
            account = store.account(record.id, own)
            yield from ((each, number, own) for each in _answer(said, account))
    if record.draft:
        draft = _question(record.draft, record.waiting)
        yield from ((each, number + 1, "") for each in draft)
    elif record.waiting:
        yield _notice(f"Read: {', '.join(record.waiting)}", ""), number, ""


def start_of(said: Sequence[StoredMessage], former: int | None = None) -> int:
    """How many messages to leave out: of a long conversation only the latest are shown, starting
    with one of the user's. If many more were shown before (all but `former`), someone asked for
    them."""
    start = max(0, len(said) - LATEST)
    while start and said[start].role != "user":
        start -= 1
    if former is None or former >= start or len(said) - former <= LATEST + MORE:
        return start
    return former


def _question(text: str, documents: Sequence[str]) -> list[Message]:
    about = [_notice(f"About {', '.join(documents)}", "")] if documents else []
    return [*about, {"role": "user", "content": sanitized(text)}]


def _answer(said: StoredMessage, account: Mapping[str, Any]) -> list[Message]:
    told = [_notice(account["brief"], "\n\n".join(account["told"]))] if account else []
    return [answered(said.text), *told]


def answered(text: str) -> Message:
    """An answer, or what there is of it."""
    return {"role": "assistant", "content": sanitized(formulas(text))}


def _notice(title: str, content: str) -> Message:
    """What kvlite says; it unfolds at a click."""
    return {
        "role": "assistant",
        "content": content,
        "metadata": {"title": title, "status": "done"},
    }
