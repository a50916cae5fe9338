"""All that was said, as a tree: its branches, where each message begins, and how to get there."""

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


@dataclass(frozen=True, eq=False)
class Position:
    """Where a message of the user's begins. Messages said in each other's place share it.

    Attributes:
        checkpoint: how things stood.
        number: messages of the user's before it.
        prefilled_ids: tokens of the message that had been read before it was said.
        prefill_start: where these begin, if there are any.
    """

    checkpoint: Checkpoint
    number: int
    prefilled_ids: list[int]
    prefill_start: "Position | None" = None


@dataclass(eq=False)
class Node:
    """A message of the user's and its answer. Nothing but the answer changes, while it comes.

    Attributes:
        parent: the message before it; None for the first one.
        start: where it begins.
        text: as it was typed.
        prompt_end: how many tokens had been read when it was.
        answer: as far as it was heard.
    """

    parent: "Node | None"
    start: Position
    text: str
    prompt_end: int
    answer: str = ""


@dataclass
class Branch:
    """One way through the tree, from its last message back to the first.

    Attributes:
        tip: the last message; None before the first.
        frozen_upto: how many messages cannot be gone back to, since the cache was compacted after
            them.
        compacted: whether what was read is no longer all there, since the cache was compacted.
        prefilled_ids: tokens of the next message that were read before it is said.
        prefill_start: where these begin, if there are any.
        boundaries: how many tokens had been read whenever a reading ended, message or not.
        token_ids: what had been read when the branch was left, since then.
        end: how it stood then.
    """

    tip: Node | None = None
    frozen_upto: int = 0
    compacted: bool = False
    prefilled_ids: list[int] = field(default_factory=list)
    prefill_start: Position | None = None
    boundaries: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: Checkpoint | None = None

    @property
    def nodes(self) -> list[Node]:
        """Its messages, the first one first."""
        found, node = list[Node](), self.tip
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def messages(self) -> list[Message]:
        """Role and content, in order; the last answer as far as it was heard."""
        pairs = [(("user", node.text), ("assistant", node.answer)) for node in self.nodes]
        return [{"role": role, "content": text} for pair in pairs for role, text in pair]

    @property
    def reachable(self) -> list[Node]:
        """The messages that can be gone back to."""
        return self.nodes[self.frozen_upto :]

    @property
    def prefill_boundaries(self) -> list[int]:
        """How many tokens had been read whenever reading ended: what is read again is read in the
        same parts."""
        nodes = self.reachable
        ahead = {node.start.checkpoint.seen for node in nodes if node.start.prefilled_ids}
        return sorted({*ahead, *(node.prompt_end for node in nodes), *self.boundaries})

    def was_read(self, start: int, end: int) -> None:
        """The tokens from one number to another were read together."""
        self.boundaries = [*(each for each in self.boundaries if each <= start), end]

    def cut(self, number: int) -> "Branch":
        """Another one that begins alike, without message `number`, counted from 0, and all that
        came after it."""
        nodes, end = self.nodes, None
        if number < len(nodes):
            end = nodes[number].start.checkpoint.seen
        return Branch(
            nodes[number - 1] if number else None,
            min(self.frozen_upto, number),
            self.compacted,
            boundaries=[each for each in self.boundaries if end is None or each <= end],
        )

    def common(self, other: "Branch") -> list[Node]:
        """The messages that begin where those of another one do, before the two part, and can be
        gone back to on both."""
        if self.frozen_upto != other.frozen_upto:
            return []
        own = self.reachable
        pairs = zip(own, other.reachable, strict=False)
        parts = [one.start is not two.start for one, two in pairs]
        return own[: parts.index(True) if True in parts else len(parts)]

    def require(self, number: object) -> int:
        """The number of a message of the user's, counted from 1.

        Raises:
            SettingError: there is none of that number, or it cannot be gone back to.
        """
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
    """A branch, as front ends show it.

    Attributes:
        messages: role and content, in order.
        current: whether the conversation is on it.
    """

    messages: list[Message]
    current: bool


class History:
    """The tree, and where the conversation stands in it. Editing, undoing, answering again and
    changing branches all pick a position, and seek the context to it.

    Attributes:
        context: what was read on the current branch.
        branches: in the order in which they were begun.
        current: the index of the one that the conversation is on.
        here: where the conversation went back to, as long as nothing was read since.
        prompt: the last message as it was read, for another answer to it.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.branches = [Branch()]
        self.current = 0
        self.here: Position | None = None
        self.prompt: Checkpoint | None = None
        self._left = 0

    def resume(self, branches: list[Branch], current: int) -> None:
        """Go on with the branches of another, which must not go on itself."""
        self.branches, self.current = branches, current
        held = {
            id(start.checkpoint): start.checkpoint
            for branch in branches
            for node in branch.nodes
            for start in (node.start, node.start.prefill_start)
            if start is not None and not start.checkpoint.lost
        }
        self.context.checkpoints = sorted(held.values(), key=lambda each: each.seen)

    @property
    def branch(self) -> Branch:
        """The current one."""
        return self.branches[self.current]

    @property
    def views(self) -> list[BranchView]:
        """The branches as front ends show them."""
        return [
            BranchView(branch.messages, index == self.current)
            for index, branch in enumerate(self.branches)
        ]

    def next_position(self, config: EngineConfig) -> Position:
        """Where something that is said now begins."""
        if self.here is not None:
            return self.here
        made, branch = self.context.checkpoint(config), self.branch
        ahead = [*branch.prefilled_ids], branch.prefill_start
        return Position(made, len(branch.nodes), *ahead)

    def next_turn(self, ids: list[int], config: EngineConfig, *, answers: bool = True) -> Turn:
        """A turn that reads tokens, for which room is made if it has to be and may.

        Raises:
            ContextError, SettingError: as `Turn`.
        """
        grown = self.context.outgrows(len(ids), config, answers=answers)
        if grown and config.settings.beyond_context == "compact":
            self.context.require_readable(ids, config, answers=answers)
            ids = [*self.context.compact(), *ids]
            branch = self.branch
            branch.frozen_upto, branch.compacted = len(branch.nodes), True
            branch.boundaries, branch.prefill_start = [], None
            self._moved()
        return self.context.next_turn(ids, config, answers=answers)

    def read(self, turn: Turn, callbacks: Callbacks, start: Position | None = None) -> None:
        """Read a turn: from then on nothing else can be answered before it.

        Args:
            start: where it begins, if that can be gone back to.
        """
        before = len(self.context.token_ids)
        try:
            self.context.read(turn, callbacks)
        except BaseException:
            if start is not None and start is not self.here:
                self.context.release(start.checkpoint)
            raise
        self.branch.was_read(before, len(self.context.token_ids))
        self._moved()
        self.branch.prefilled_ids, self.branch.prefill_start = [], None

    def say(self, start: Position, text: str) -> Node:
        """Put a message that was read, and is about to be answered, at the end of the branch."""
        node = Node(self.branch.tip, start, text, len(self.context.token_ids))
        self.branch.tip = node
        return node

    def fork(self, number: int, config: EngineConfig) -> Branch:
        """Begin a branch without message `number`, counted from 0, and what came after it; the
        branch that is left."""
        left = self._leave(config)
        self._begin(left.cut(number))
        return left

    def redraw(self, config: EngineConfig, callbacks: Callbacks) -> Turn | None:
        """Leave the last message and its answer; the turn to answer anew, if that needs nothing to
        be read. If not, the message has to be said again."""
        nodes, prompt, turn = self.branch.nodes, self.prompt, self.context.turn
        self.prompt = None
        left = self.fork(len(nodes) - 1, config)
        if prompt is not None and turn is not None:
            if self.context.seek_answer(prompt, turn, config):
                self.prompt = prompt
                return turn
            self.context.release(prompt)
        self._stand_at(nodes[-1].start, left, config, callbacks)
        return None

    def seek(
        self, number: int, position: Position, config: EngineConfig, callbacks: Callbacks
    ) -> Branch:
        """Begin a branch without message `number`, counted from 0, and stand at a position of the
        one that is left, which is returned."""
        left = self.fork(number, config)
        self._stand_at(position, left, config, callbacks)
        return left

    def undo(self, config: EngineConfig, callbacks: Callbacks) -> Node:
        """Forget the last message and its answer, which are returned."""
        nodes = self.branch.nodes
        left = self.seek(len(nodes) - 1, nodes[-1].start, config, callbacks)
        self.current = self._left
        self.branches[self.current] = self.branches.pop()
        if left.end is not None:
            self.context.release(left.end)
        return nodes[-1]

    def switch(self, branch: int, config: EngineConfig, callbacks: Callbacks) -> None:
        """Go on with another branch.

        Raises:
            SettingError: there is none of that number.
        """
        chosen = whole_number(branch)
        if chosen is None or not 0 <= chosen < len(self.branches):
            called, count = repr(branch) if chosen is None else chosen + 1, len(self.branches)
            raise SettingError(f"there is no branch {called}: there are {count} of them")
        if chosen == self.current:
            return
        target = self.branches[chosen]
        common, end = target.common(self.branch), target.end
        self._leave(config)
        self._begin(target.cut(target.frozen_upto + len(common)))
        ancestors = [node.start.checkpoint for node in reversed(common)]
        assert end is not None
        self._go(target, target.token_ids, end, ancestors, config, callbacks)
        self.branches.pop()
        self.current = chosen
        self.context.release(end)

    def _stand_at(
        self, position: Position, left: Branch, config: EngineConfig, callbacks: Callbacks
    ) -> None:
        assert left.end is not None
        ids, point = [*left.token_ids, *left.end.pending_ids], position.checkpoint
        ancestors = [
            node.start.checkpoint for node in left.reachable if node.start.number < position.number
        ]
        if position.prefill_start is not None:
            ancestors.append(position.prefill_start.checkpoint)
        self._go(left, ids[: point.seen], point, ancestors[::-1], config, callbacks)
        self.branch.prefilled_ids = [*position.prefilled_ids]
        self.branch.prefill_start, self.here = position.prefill_start, position

    def _go(
        self,
        branch: Branch,
        ids: list[int],
        end: Checkpoint,
        ancestors: Sequence[Checkpoint],
        config: EngineConfig,
        callbacks: Callbacks,
    ) -> None:
        """Let things stand as when `ids` had been read, the beginning of a branch; if that fails,
        as at a message before, or as they do."""
        before = self.context.cache
        try:
            self.context.seek(ids, end, ancestors, branch.prefill_boundaries, config, callbacks)
        except BaseException:
            if self.context.cache is before:
                self.branches.pop()
                self.current = self._left
                raise
            seen = len(self.context.token_ids)
            number = sum(node.start.checkpoint.seen < seen for node in branch.reachable)
            self.branches[self.current] = branch.cut(branch.frozen_upto + number)
            self.here = None
            raise

    def _leave(self, config: EngineConfig) -> Branch:
        """The current branch, with how it ends."""
        branch = self.branch
        if branch.end is not None:
            self.context.release(branch.end)
        branch.token_ids, branch.end = [*self.context.token_ids], self.context.checkpoint(config)
        return branch

    def _begin(self, branch: Branch) -> None:
        self.branches.append(branch)
        self._left, self.current = self.current, len(self.branches) - 1
        self._moved()

    def _moved(self) -> None:
        """Things do not stand any more as where something was said."""
        if self.prompt is not None:
            self.context.release(self.prompt)
        self.prompt = self.here = None
