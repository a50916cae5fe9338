"""What people see of a conversation, as it is kept on disk and shown before an engine opens it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from kvlite.methods import renamed

# Characters of a message by which it, or a conversation that begins with it, is known.
_NAME = 48


@dataclass
class StoredMessage:
    """A message.

    Attributes:
        role: "user" or "assistant".
        text: as it was typed, or answered.
        documents: names of those that went before it.
    """

    role: str
    text: str
    documents: tuple[str, ...] = ()


@dataclass
class Branch:
    """A way the conversation went, by what tells it from the others."""

    title: str
    current: bool


@dataclass
class Record:
    """A conversation.

    Attributes:
        id: of its folder.
        name: what its owner calls it; "" until something was said.
        created, used: in seconds since 1970.
        model: what it was had with.
        began: the settings it began with, by name, but those that only loading a model heeds.
        changed: those that were changed for it since.
        said: on the current branch.
        branches: all of them.
        elsewhere: what was said on those that are not the current one, and not on it.
        waiting: names of documents that the next message will be about.
        draft: a message that was sent and has no answer yet.
    """

    id: str
    name: str = ""
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    model: str = ""
    began: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    said: list[StoredMessage] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    draft: str = ""

    @property
    def title(self) -> str:
        """What to call it in a list."""
        return self.name or "New conversation"

    @property
    def questions(self) -> int:
        """How many messages of the user's there are."""
        return sum(each.role == "user" for each in self.said)

    @property
    def branch(self) -> int | None:
        """The current branch, counted from 1; None if there is none yet."""
        return next((n for n, each in enumerate(self.branches, 1) if each.current), None)

    def before(self, number: int) -> int:
        """How many messages go before the user's of this number, counted from 1."""
        users = [index for index, each in enumerate(self.said) if each.role == "user"]
        return users[number - 1] if 1 <= number <= len(users) else len(self.said)

    def name_after(self, text: str) -> None:
        """Call it after a message or a document, unless it has a name."""
        if not self.name:
            self.name = first_words(text)

    def matches(self, query: str) -> bool:
        """Whether all words of a query are in its name, its documents or what was said, on
        whatever branch."""
        texts = [self.title, *self.waiting, *self.elsewhere]
        texts += [text for each in self.said for text in (each.text, *each.documents)]
        whole = "\n".join(texts).casefold()
        return all(word in whole for word in query.casefold().split())

    def to_json(self) -> str:
        """As a file has it."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """The one that a file has.

        Raises:
            ValueError, TypeError, KeyError: it has none.
        """
        plain = json.loads(text)
        plain["said"] = [
            StoredMessage(each["role"], each["text"], tuple(each["documents"]))
            for each in plain["said"]
        ]
        plain["branches"] = [Branch(**each) for each in plain["branches"]]
        record = cls(**plain)
        record.began = renamed(record.began)
        texts = [record.name, record.draft, *record.waiting, *record.elsewhere]
        texts += [each.text for each in record.said]
        if not all(isinstance(each, str) for each in texts):
            raise TypeError("its texts are not texts")
        record.created, record.used = float(record.created), float(record.used)
        return record

    def markdown(self) -> str:
        """The conversation for people, in Markdown."""
        lines = [f"# {self.title}", ""]
        for each in self.said:
            lines += [f"**{'You' if each.role == 'user' else self.model or 'Model'}**", ""]
            lines += [f"*About {', '.join(each.documents)}*", ""] if each.documents else []
            lines += [each.text.strip(), ""]
        return "\n".join(lines)


def titles(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Conversations as a list has them, each with its id."""
    return [(each.title, each.id) for each in records]


def first_words(text: str) -> str:
    """By what a text is known, in a line."""
    line = " ".join(text.split())
    return line if len(line) <= _NAME else f"{line[: _NAME - 1].rstrip()}…"


def keys_of(said: Sequence[StoredMessage]) -> list[str]:
    """For each message, what the account of it as an answer is kept under: it stands for the
    message and all that was said before it."""
    found, before = [], ""
    for each in said:
        plain = json.dumps([before, each.role, each.text, each.documents])
        before = sha256(plain.encode()).hexdigest()[:16]
        found.append(before)
    return found


def said_in(messages: Sequence[Mapping[str, str]], typed: Sequence[Any]) -> list[StoredMessage]:
    """Messages as people see them.

    Args:
        messages: role and content, as the model was told.
        typed: the user's as they were typed, in order: `kvlite.conversation.session.Message`.
    """
    own = iter(typed)
    found = []
    for each in messages:
        if each["role"] == "user":
            message = next(own)
            names = tuple(document.name for document in message.documents)
            found.append(StoredMessage("user", message.text, names))
        else:
            found.append(StoredMessage("assistant", each["content"]))
    return found
