"""Messages and answers, and the ways through the tree that they make."""

from dataclasses import dataclass, field
from typing import Any

from kvlite.config.arguments import whole_number
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.metrics import Piece
from kvlite.errors import SettingError

Message = dict[str, Any]


@dataclass(eq=False)
class Node:
    """A user message and its answer, which grows while it comes; nothing else changes.

    Attributes:
        parent: the message before it; None for the first one.
        prompt_end: tokens read up to the end of the message.
    """

    parent: "Node | None"
    start: Checkpoint
    text: str
    prompt_end: int
    answer: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0

    def hear(self, piece: Piece) -> None:
        """More of the answer has come."""
        self.answer += piece.text
        self.reasoning += piece.reasoning
        self.reasoning_tokens = piece.reasoning_tokens


@dataclass
class Branch:
    """One way through the tree, from its last message (`tip`) back to the first.

    Attributes:
        frozen_upto: messages that cannot be gone back to, since the cache was compacted after them.
        compacted: whether the cache was compacted, so that some of what was read is gone.
        prefilled_ids: tokens of the next message that were read before it is said.
        prefill_start: where those begin.
        boundaries: token counts at which a reading ended, of a message or anything else.
        token_ids, end: what had been read, and a checkpoint, when the branch was left.
    """

    tip: Node | None = None
    frozen_upto: int = 0
    compacted: bool = False
    prefilled_ids: list[int] = field(default_factory=list)
    prefill_start: Checkpoint | None = None
    boundaries: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: Checkpoint | None = None

    @property
    def nodes(self) -> list[Node]:
        """Its messages, in order."""
        found, node = list[Node](), self.tip
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def messages(self) -> list[Message]:
        """Role and content of messages and answers, in order."""
        made = list[Message]()
        for node in self.nodes:
            answer: Message = {"role": "assistant", "content": node.answer}
            if node.reasoning:
                answer["reasoning_content"] = node.reasoning
                answer["reasoning_tokens"] = node.reasoning_tokens
            made += [{"role": "user", "content": node.text}, answer]
        return made

    @property
    def reachable(self) -> list[Node]:
        """The messages that can be gone back to."""
        return self.nodes[self.frozen_upto :]

    @property
    def prefill_boundaries(self) -> list[int]:
        """All token counts at which a reading ended: what is read again is read in the same
        parts."""
        nodes = self.reachable
        ahead = {node.start.seen for node in nodes if node.start.prefilled_ids}
        return sorted({*ahead, *(node.prompt_end for node in nodes), *self.boundaries})

    def was_read(self, start: int, end: int) -> None:
        """The tokens from `start` to `end` were read together."""
        self.boundaries = [*(each for each in self.boundaries if each <= start), end]

    def cut(self, number: int) -> "Branch":
        """A new branch with the messages before `number`, counted from 0."""
        nodes, end = self.nodes, None
        if number < len(nodes):
            end = nodes[number].start.seen
        return Branch(
            nodes[number - 1] if number else None,
            min(self.frozen_upto, number),
            self.compacted,
            boundaries=[each for each in self.boundaries if end is None or each <= end],
        )

    def common(self, other: "Branch") -> list[Node]:
        """The reachable messages before the two branches part."""
        if self.frozen_upto != other.frozen_upto:
            return []
        own = self.reachable
        pairs = zip(own, other.reachable, strict=False)
        parts = [one.start is not two.start for one, two in pairs]
        return own[: parts.index(True) if True in parts else len(parts)]

    def require(self, number: object) -> int:
        """The number of a user message, counted from 1. Raises SettingError if there is no such
        message, or it cannot be gone back to."""
        count, found = len(self.nodes), whole_number(number)
        if not count:
            raise SettingError("nothing has been said yet: there is no message to go back to")
        if found is None or not 1 <= found <= count:
            raise SettingError(
                f"there is no message {number!r}: they are numbered from 1 to {count}"
            )
        if found <= self.frozen_upto:
            raise SettingError(
                f"message {found} cannot be gone back to: since then the conversation outgrew the "
                "model's context, and some of what was read is forgotten"
            )
        return found


@dataclass(frozen=True)
class BranchView:
    """A branch as front ends show it; `current` if the conversation is on it."""

    messages: list[Message]
    current: bool
