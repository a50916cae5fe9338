"""What was said, as a tree: the branches, where each message begins, and how to get there."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlite.config.arguments import whole_number
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.context import Context
from kvlite.conversation.turn import Turn
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError
from kvlite.methods.engine_config import EngineConfig

Message = dict[str, str]


@dataclass
class Node:
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
    before: "Node | None" = None


@dataclass
class Path:
    """One way. Ways that have a beginning in common share what was said there.

    Attributes:
        messages: role and content, in order.
        said: one for each message of the user's.
        read: how many tokens had been read when each of them was.
        frozen_upto: of these, how many cannot be gone back to, since the cache was compacted after
            them.
        ahead: tokens of the next message that were read before it is said.
        before: where these begin, if there are any.
        token_ids: what had been read when it was left, since then.
        end: how it stood then.
        parts: how many tokens had been read whenever a reading ended, message or not.
        compacted: whether what was read is no longer all there, since the cache was compacted.
    """

    messages: list[Message] = field(default_factory=list)
    said: list[Node] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    frozen_upto: int = 0
    ahead: list[int] = field(default_factory=list)
    before: Node | None = None
    token_ids: list[int] = field(default_factory=list)
    end: Checkpoint | None = None
    parts: list[int] = field(default_factory=list)
    compacted: bool = False

    def cut(self, number: int) -> "Path":
        """Another one that begins alike, without user message `number`, counted from 0, and all
        that came after it."""
        count = self.said[number].messages if number < len(self.said) else len(self.messages)
        frozen = min(self.frozen_upto, number)
        cut = Path(self.messages[:count], self.said[:number], self.read[:number], frozen)
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
        return sorted({*ahead, *self.read[self.frozen_upto :], *self.parts})

    @property
    def open(self) -> list[Node]:
        """What can be gone back to."""
        return self.said[self.frozen_upto :]

    def common(self, other: "Path") -> list[Node]:
        """What was said on both, before they part, and can be gone back to on both."""
        if self.frozen_upto != other.frozen_upto:
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
        if found <= self.frozen_upto:
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


class History:
    """All ways that a conversation went.

    Attributes:
        context: what was read on the current one.
        paths: in the order in which they were begun.
        at: the current one's index.
        here: where the conversation went back to, as long as nothing was read since.
        unanswered: the last message as it was read, for another answer to it.
        former: index of the way that was left last.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.paths = [Path()]
        self.at = 0
        self.here: Node | None = None
        self.unanswered: Checkpoint | None = None
        self.former = 0

    def resume(self, paths: list[Path], at: int) -> None:
        """Go on with others, which must not go on themselves."""
        self.paths, self.at = paths, at
        held = {
            id(said.checkpoint): said.checkpoint
            for path in self.paths
            for each in path.said
            for said in (each, each.before)
            if said is not None and not said.checkpoint.lost
        }
        self.context.checkpoints = sorted(held.values(), key=lambda each: each.seen)

    @property
    def path(self) -> Path:
        """The current one."""
        return self.paths[self.at]

    @property
    def branches(self) -> list[Branch]:
        """As front ends show them."""
        return [Branch([*path.messages], index == self.at) for index, path in enumerate(self.paths)]

    def node_here(self, config: EngineConfig) -> Node:
        """Where something that is said now begins."""
        if self.here is not None:
            return self.here
        made = self.context.hold(config)
        return Node(made, len(self.path.messages), [*self.path.ahead], self.path.before)

    def take(self, turn: Turn, callbacks: Callbacks, said: Node | None = None) -> None:
        """Read a turn: from then on nothing else can be answered before it.

        Args:
            said: where it begins, if that can be gone back to.
        """
        start = len(self.context.token_ids)
        try:
            self.context.read(turn, callbacks)
        except BaseException:
            if said is not None and said is not self.here:
                self.context.leave(said.checkpoint)
            raise
        self.path.took(start, len(self.context.token_ids))
        self._moved()
        self.path.ahead, self.path.before = [], None

    def next_turn(self, ids: list[int], config: EngineConfig, *, answers: bool = True) -> Turn:
        """A turn that reads tokens, for which room is made if it has to be and may.

        Raises:
            ContextError, SettingError: as `Turn`.
        """
        grown = self.context.outgrows(len(ids), config, answers=answers)
        if grown and config.settings.beyond_context == "compact":
            self.context.require_readable(ids, config, answers=answers)
            ids = [*self.context.compact(), *ids]
            self.path.frozen_upto, self.path.parts = len(self.path.said), []
            self.path.compacted = True
            self._moved()
            self.path.before = None
        return self.context.next_turn(ids, config, answers=answers)

    def leave(self, number: int, config: EngineConfig) -> Path:
        """Go another way from user message `number` on, counted from 0; the one that is left."""
        path = self._kept(config)
        self._begin(path.cut(number))
        return path

    def answer_again(self, config: EngineConfig, callbacks: Callbacks) -> Turn | None:
        """Leave the last message and its answer; the turn to answer anew, if that needs nothing to
        be read. If not, the message has to be said again."""
        read, turn, said = self.unanswered, self.context.turn, self.path.said[-1]
        self.unanswered = None
        left = self.leave(len(self.path.said) - 1, config)
        if read is not None and turn is not None and self.context.seek_answer(read, turn, config):
            self.unanswered = read
            return turn
        if read is not None and turn is not None:
            self.context.leave(read)
        self._stand_at(said, left, config, callbacks)
        return None

    def seek(self, number: int, node: Node, config: EngineConfig, callbacks: Callbacks) -> Path:
        """Go another way from user message `number` on, counted from 0, and stand at a node of the
        one that is left, which is returned."""
        left = self.leave(number, config)
        self._stand_at(node, left, config, callbacks)
        return left

    def _stand_at(self, said: Node, left: Path, config: EngineConfig, callbacks: Callbacks) -> None:
        assert left.end is not None
        heard, point = [*left.token_ids, *left.end.pending], said.checkpoint
        ways = [each.checkpoint for each in left.open if each.messages < said.messages]
        if said.before is not None:
            ways.append(said.before.checkpoint)
        self._go(left, heard[: point.seen], point, ways[::-1], config, callbacks)
        self.path.ahead, self.path.before, self.here = [*said.ahead], said.before, said

    def undo(self, config: EngineConfig, callbacks: Callbacks) -> Node:
        """Forget the last message and its answer; where it began."""
        said = self.path.said[-1]
        left = self.seek(len(self.path.said) - 1, said, config, callbacks)
        self.at = self.former
        self.paths[self.at] = self.paths.pop()
        if left.end is not None:
            self.context.leave(left.end)
        return said

    def switch(self, branch: int, config: EngineConfig, callbacks: Callbacks) -> None:
        """Go on with another way.

        Raises:
            SettingError: there is none of that number.
        """
        chosen = whole_number(branch)
        if chosen is None or not 0 <= chosen < len(self.paths):
            called = repr(branch) if chosen is None else chosen + 1
            raise SettingError(f"there is no branch {called}: there are {len(self.paths)} of them")
        branch = chosen
        if branch == self.at:
            return
        target = self.paths[branch]
        common, end = target.common(self.path), target.end
        self._kept(config)
        self._begin(target.cut(target.frozen_upto + len(common)))
        ways = [said.checkpoint for said in reversed(common)]
        assert end is not None
        self._go(target, target.token_ids, end, ways, config, callbacks)
        self.paths.pop()
        self.at = branch
        self.context.leave(end)

    def _kept(self, config: EngineConfig) -> Path:
        """The current way, with how it ends."""
        path = self.path
        if path.end is not None:
            self.context.leave(path.end)
        path.token_ids, path.end = [*self.context.token_ids], self.context.hold(config)
        return path

    def _begin(self, path: Path) -> None:
        self.paths.append(path)
        self.former, self.at = self.at, len(self.paths) - 1
        self._moved()

    def _moved(self) -> None:
        """Things do not stand any more as where something was said."""
        if self.unanswered is not None:
            self.context.leave(self.unanswered)
        self.unanswered = self.here = None

    def _go(
        self,
        way: Path,
        ids: list[int],
        end: Checkpoint,
        ways: Sequence[Checkpoint],
        config: EngineConfig,
        callbacks: Callbacks,
    ) -> None:
        """Let things stand as when `ids` had been read, the beginning of a way; if that fails, as
        at a message before, or as they do."""
        before = self.context.cache
        try:
            self.context.seek(ids, end, ways, way.stops, config, callbacks)
        except BaseException:
            if self.context.cache is before:
                self.paths.pop()
                self.at = self.former
                raise
            seen = len(self.context.token_ids)
            number = sum(said.checkpoint.seen < seen for said in way.open)
            self.paths[self.at] = way.cut(way.frozen_upto + number)
            self.here = None
            raise
