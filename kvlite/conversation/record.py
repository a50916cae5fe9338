"""What people see of a conversation or a document: kept on disk, and shown before the engine opens
it."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from kvlite.config.checked_file import of_type, sound
from kvlite.config.settings import LOADING, Settings
from kvlite.conversation.message import Message
from kvlite.methods import renamed

# What `made_by` says of a server's conversations.
SERVER = "server"
# Characters of a message that serve as its name.
_NAME = 48


@dataclass
class StoredMessage:
    """A message as it was typed or answered, the names of documents that came before it, and what
    was thought before an answer."""

    role: str
    text: str
    documents: tuple[str, ...] = ()
    reasoning: str = ""
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class ToldTimes:
    """Dates and times of now, as a program's prompt told them.

    Attributes:
        text: which of its texts, by a hash of all else in it.
        values: as it had them, in order.
        since: when they were right, in seconds since 1970.
    """

    text: str
    values: tuple[str, ...]
    since: float


@dataclass
class Branch:
    """A branch of a conversation, by a title that tells it from the others."""

    title: str
    current: bool


@dataclass
class Record:
    """A conversation.

    Attributes:
        id: the name of its folder.
        name: what its owner calls it, or how the first message begins; "" until one was sent.
        created, used: in seconds since 1970.
        model: the one that answered last.
        began: the settings it began with, except those that apply only when a model is loaded.
        changed: settings that were changed for it since.
        said: the messages on the current branch.
        elsewhere: what was said on other branches only.
        waiting: names of documents that the next message will be about.
        draft: a message that was sent and has no answer yet.
        is_document: whether it is a document that was read, with which conversations begin; none is
            written in its place.
        made_by: SERVER for what a server's client said; "" for what was typed here.
        earlier: how many of `said` come before its branches, as they were a program's prompt: none
            of them can be edited.
        times: that the program's prompt told.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

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
    is_document: bool = False
    made_by: str = ""
    earlier: int = 0
    times: list[ToldTimes] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its name in the list."""
        return self.name or first_words(", ".join(self.documents)) or "New conversation"

    @property
    def documents(self) -> list[str]:
        """Names of the documents that were read, each once."""
        said = [name for each in self.said for name in each.documents]
        return list(dict.fromkeys([*said, *self.waiting]))

    @property
    def questions(self) -> int:
        """How many messages the user sent."""
        return sum(each.role == "user" for each in self.said)

    @property
    def branch(self) -> int | None:
        """The current branch, counted from 1; None before the first message."""
        return next((n for n, each in enumerate(self.branches, 1) if each.current), None)

    def before(self, number: int) -> int:
        """How many messages precede the user's message `number`, counted from 1."""
        later = enumerate(self.said[self.earlier :], self.earlier)
        users = [index for index, each in later if each.role == "user"]
        return users[number - 1] if 1 <= number <= len(users) else len(self.said)

    def name_after(self, text: str) -> None:
        """Name it after a message, unless it has a name."""
        self.name = self.name or first_words(text)

    def matches(self, query: str) -> bool:
        """Whether all words of a query are in its name, documents or messages, on any branch."""
        texts = [self.title, *self.waiting, *self.elsewhere]
        texts += [text for each in self.said for text in (each.text, *each.documents)]
        whole = "\n".join(texts).casefold()
        return all(word in whole for word in query.casefold().split())

    def update(
        self,
        branches: Sequence[list[StoredMessage]],
        current: int,
        given: Settings,
        waiting: Sequence[str],
    ) -> None:
        """Say how it is now: what was said on its branches, the settings it began with, and names
        of the documents that its next message will be about."""
        self.began = self.began or {
            name: value for name, value in vars(given).items() if name not in LOADING
        }
        self.said, self.used = [*self.said[: self.earlier], *branches[current]], time.time()
        self.model = given.model
        self.waiting = [*waiting]
        self.branches, self.elsewhere = branches_of(branches, current)

    def to_json(self) -> str:
        """The content of its file."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: bytes) -> "Record":
        """The record in a file; raises Damaged if it is damaged, or of a later version."""
        with sound():
            record = _RECORD.validate_json(text)
            for number in (record.created, record.used):
                of_type(float, number)
            record.began = renamed(record.began)
            return record


_RECORD = TypeAdapter(Record)


def first_words(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _NAME else f"{line[: _NAME - 1].rstrip()}…"


def keys_of(said: Sequence[StoredMessage]) -> list[str]:
    """For each message, the key of its account: a hash of the message and all before it. Reasoning
    tells answers apart that have none yet."""
    found, before = [], ""
    for each in said:
        thought = [] if each.text or not each.reasoning else [each.reasoning]
        plain = json.dumps([before, each.role, each.text, each.documents, *thought])
        before = sha256(plain.encode()).hexdigest()[:16]
        found.append(before)
    return found


def stored(messages: Sequence[dict[str, Any]], typed: Iterable[Message]) -> list[StoredMessage]:
    """Messages of a conversation as people see them: the user's as they were `typed`."""
    asked, found = iter(typed), []
    for each in messages:
        if each["role"] == "user":
            message = next(asked)
            names = tuple(document.name for document in message.documents)
            found.append(StoredMessage("user", message.text, names))
        else:
            thought = each.get("reasoning_content", ""), each.get("reasoning_tokens", 0)
            found.append(StoredMessage("assistant", each["content"], (), *thought))
    return found


def branches_of(
    said: Sequence[Sequence[StoredMessage]], current: int
) -> tuple[list[Branch], list[str]]:
    """All branches of a conversation by what was `said` on them; and what was said, and which
    documents were read, on those that are not the `current` one and not on it, each once."""
    questions, answers = [], []
    for messages in said:
        asked = [each.text for each in messages if each.role == "user"]
        questions.append(asked[-1] if asked else "the beginning")
        last = messages[-1] if messages else None
        answers.append(last.text if last is not None and last.role == "assistant" else "")
    titles = told_apart(questions, answers)
    found = [Branch(title, number == current) for number, title in enumerate(titles)]
    here, others = set[str](), dict[str, None]()
    for number, messages in enumerate(said):
        texts = [text for one in messages for text in (one.text, *one.documents)]
        others |= dict.fromkeys(texts)
        if number == current:
            here.update(texts)
    return found, [text for text in others if text not in here]


def told_apart(questions: Sequence[str], answers: Sequence[str]) -> list[str]:
    """Titles of branches: the last question; with its answer, if there is one, if others end in the
    same question; with a number if others have both."""
    titles = [first_words(each) for each in questions]
    counts = Counter(titles)
    titles = [
        f"{title} → {first_words(answer)}" if answer and counts[title] > 1 else title
        for title, answer in zip(titles, answers, strict=True)
    ]
    counts, before = Counter(titles), Counter[str]()
    for number, title in enumerate(titles):
        before[title] += 1
        if counts[title] > 1:
            titles[number] = f"{before[title]}. {title}"
    return titles
