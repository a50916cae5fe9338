"""A conversation as the page's chat shows it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlite.conversation.library import Library
from kvlite.conversation.message import counted_tokens, thought_for
from kvlite.conversation.record import Record, StoredMessage, keys_of
from kvlite.web.work import Shown

from .markdown import formulas, sanitized
from .sources import sources_html

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

    def add(self, messages: Sequence[Message], number: int, key: str = "") -> None:
        """Add messages that belong together."""
        self.messages.extend(messages)
        self.numbers.extend([number] * len(messages))
        self.keys.extend([key] * len(messages))

    def answer_keys(self) -> list[str]:
        """The keys of all answers, in order."""
        return list(dict.fromkeys(filter(None, self.keys)))


def history(
    record: Record, store: Library, start: int = 0, reading: Collection[str] = ()
) -> History:
    """What was said, each answer with its sources and figures below it, without the first `start`
    messages. Of the documents that wait for a message those in `reading` are not read yet."""
    before = sum(each.role == "user" for each in record.said[:start])
    number = before - sum(each.role == "user" for each in record.said[: record.earlier])
    shown, keys = History([], [], [], before), keys_of(record.said)
    for said, key in zip(record.said[start:], keys[start:], strict=True):
        if said.role == "user":
            number += 1
            shown.add(_question(said.text, said.documents), max(0, number))
        else:
            shown.add(_answer(said, store.account(record.id, key), key), max(0, number), key)
    if record.draft:
        shown.add(_question(record.draft, record.waiting), number + 1)
        return shown
    read = [each for each in record.waiting if each not in reading]
    for told, names in (("Read", read), ("Reading", reading)):
        if names:
            shown.add([_notice(f"{told}: {', '.join(names)}", "")], number)
    return shown


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


def _answer(said: StoredMessage, account: Mapping[str, Any], key: str) -> list[Message]:
    shown = thoughts(said.reasoning, said.reasoning_tokens)
    if said.text or not shown:  # it may have been cut while it was thought
        shown.append(answered(said.text))
    if not account:
        return shown
    if sources := account.get("sources"):
        shown.append({"role": "assistant", "content": sources_html(sources, key)})
    told = "\n".join(f"- {sanitized(each)}" for each in account["told"])
    return [*shown, _notice(account["brief"], told)]


def thoughts(reasoning: str, tokens: int, *, lasts: bool = False) -> list[Message]:
    """What was thought before an answer, folded, while it `lasts` or afterwards; nothing if nothing
    was."""
    if not reasoning:
        return []
    title = f"Thinking\u2026 {counted_tokens(tokens)}" if lasts else thought_for(tokens)
    return [_notice(title, sanitized(formulas(reasoning)))]


def answering(shown: Shown) -> list[Message]:
    """What there is of an answer that comes."""
    lasts = not shown.text
    thought = thoughts(shown.reasoning, shown.reasoning_tokens, lasts=lasts)
    return [*thought, answered(shown.text)] if shown.text else thought


def answered(text: str) -> Message:
    """An answer, or what there is of it."""
    return {"role": "assistant", "content": sanitized(formulas(text))}


def _notice(title: str, content: str) -> Message:
    return {
        "role": "assistant",
        "content": content,
        "metadata": {"title": title, "status": "done"},
    }
