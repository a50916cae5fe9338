"""The ways a conversation went: what was said on each, and where one can go back to."""

from dataclasses import dataclass, field

from kvlite.config.arguments import whole_number
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.errors import SettingError

Message = dict[str, str]


@dataclass
class Said:
    """Where a message of the user's begins.

    Attributes:
        checkpoint: how things stood.
        messages: how many there were before it.
        ahead: tokens of it that had been read before it was said.
        before: where these begin, if there are any.
    """

    checkpoint: Checkpoint
    messages: int
    ahead: list[int]
    before: "Said | None" = None


@dataclass
class Path:
    """One way. Ways that have a beginning in common share what was said there.

    Attributes:
        messages: role and content, in order.
        said: one for each message of the user's.
        read: how many tokens had been read when each of them was.
        sealed: of these, how many cannot be gone back to, since the cache was compacted after them.
        ahead: tokens of the next message that were read before it is said.
        before: where these begin, if there are any.
        token_ids: what had been read when it was left, since then.
        end: how it stood then.
        parts: how many tokens had been read whenever a reading ended, message or not.
        compacted: whether what was read is no longer all there, since the cache was compacted.
    """

    messages: list[Message] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    sealed: int = 0
    ahead: list[int] = field(default_factory=list)
    before: Said | None = None
    token_ids: list[int] = field(default_factory=list)
    end: Checkpoint | None = None
    parts: list[int] = field(default_factory=list)
    compacted: bool = False

    def cut(self, number: int) -> "Path":
        """Another one that begins alike, without user message `number`, counted from 0, and all
        that came after it."""
        count = self.said[number].messages if number < len(self.said) else len(self.messages)
        sealed = min(self.sealed, number)
        cut = Path(self.messages[:count], self.said[:number], self.read[:number], sealed)
        end = self.said[number].checkpoint.seen if number < len(self.said) else None
        cut.parts = [part for part in self.parts if end is None or part <= end]
        cut.compacted = self.compacted
        return cut

    def took(self, start: int, end: int) -> None:
        """The tokens from one number to another were read together."""
        self.parts = [*(part for part in self.parts if part <= start), end]

    @property
    def stops(self) -> list[int]:
        """How much had been read whenever reading ended."""
        ahead = [said.checkpoint.seen for said in self.open if said.ahead]
        return sorted({*ahead, *self.read[self.sealed :], *self.parts})

    @property
    def open(self) -> list[Said]:
        """What can be gone back to."""
        return self.said[self.sealed :]

    def common(self, other: "Path") -> list[Said]:
        """What was said on both, before they part, and can be gone back to on both."""
        if self.sealed != other.sealed:
            return []
        pairs = zip(self.open, other.open, strict=False)
        parts = [one is not two for one, two in pairs]
        return self.open[: parts.index(True) if True in parts else len(parts)]

    def require(self, number: object) -> int:
        """The number of a user message, counted from 1.

        Raises:
            SettingError: there is none of that number, or it cannot be gone back to.
        """
        if not self.said:
            raise SettingError("nothing has been said yet: there is no message to go back to")
        found = whole_number(number)
        if found is None or not 1 <= found <= len(self.said):
            raise SettingError(
                f"there is no message {number!r}: they are numbered from 1 to {len(self.said)}"
            )
        if found <= self.sealed:
            raise SettingError(
                f"message {found} cannot be gone back to: since then the conversation outgrew the "
                "model's context, and some of what was read is forgotten"
            )
        return found


@dataclass(frozen=True)
class Branch:
    """A way, as front ends show it.

    Attributes:
        messages: role and content, in order.
        current: whether the conversation is on it.
    """

    messages: list[Message]
    current: bool
