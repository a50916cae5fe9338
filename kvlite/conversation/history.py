"""What was said, as a tree of messages, and how to get back to each of them."""

from collections.abc import Sequence
from typing import Any

from kvlite.config.arguments import whole_number
from kvlite.conversation.branch import Branch, Node
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.context import Context
from kvlite.conversation.half_read import HalfRead
from kvlite.conversation.turn import Turn
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.slices import Slices, whole
from kvlite.errors import SettingError, require_uncancelled
from kvlite.methods.engine_config import EngineConfig


class History:
    """The tree, and where the conversation is in it. Edit, undo, regenerate, branch and switch all
    pick a checkpoint and seek the context to it.

    Attributes:
        context: what was read on the current branch.
        branches: the oldest first.
        current: the index of the current one.
        here: the beginning of a message that was gone back to, until something is read.
        prompt: a checkpoint before the last answer, to generate another.
        keeps_half_read: whether a reading that is stopped, or left, waits for the same to be read.
        half_read: the reading that waits.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.branches = [Branch()]
        self.current = 0
        self.here: Checkpoint | None = None
        self.prompt: Checkpoint | None = None
        self.keeps_half_read = False
        self.half_read: HalfRead | None = None
        self._left = 0
        self._asked: Any = None

    def resume(self, branches: list[Branch], current: int) -> None:
        """Go on with these branches."""
        self.branches, self.current = branches, current
        held = {
            id(start): start
            for branch in branches
            for node in branch.nodes
            for start in (node.start, node.start.prefill_start)
            if start is not None and not start.lost
        }
        self.context.checkpoints = sorted(held.values(), key=lambda each: each.seen)

    @property
    def branch(self) -> Branch:
        """The current one."""
        return self.branches[self.current]

    @property
    def said(self) -> list[tuple[str, int]]:
        """The messages, and how many tokens were read up to the end of each."""
        return [(node.text, node.prompt_end) for node in self.branch.nodes]

    def next_start(self, config: EngineConfig) -> Checkpoint:
        """Where a message said now begins."""
        if self.half_read is not None and self.half_read.start is not None:
            return self.half_read.start
        if self.here is not None:
            return self.here
        start, branch = self.context.checkpoint(config), self.branch
        start.number, start.prefilled_ids = len(branch.nodes), [*branch.prefilled_ids]
        start.prefill_start = branch.prefill_start
        return start

    def next_turn(self, ids: list[int], config: EngineConfig, *, answers: bool = True) -> Turn:
        """A turn that reads `ids`; the one that is half read, if it is the same. The cache is
        compacted first if it must and may be. Errors are those of `Turn`."""
        if self.half_read is not None and self.goes_on(ids, config, answers=answers):
            return self.half_read.turn
        self._asked = [*ids], config.settings, answers
        grown = self.context.outgrows(len(ids), config, answers=answers)
        if grown and config.settings.beyond_context == "compact":
            Turn(Context(self.context.model), ids, config, answers=answers)  # or it is refused
            ids = [*self.context.compact(), *ids]
            branch = self.branch
            branch.frozen_upto, branch.compacted = len(branch.nodes), True
            branch.boundaries, branch.prefill_start = [], None
            self._clear_position_state()
            self._asked = None  # a part of it was read before
        return self.context.next_turn(ids, config, answers=answers)

    def read_in_slices(
        self, turn: Turn, callbacks: Callbacks, start: Checkpoint | None = None
    ) -> Slices[None]:
        """Read a turn, which begins at `start` if it can be gone back to. Errors are those of
        `Turn.read`; where `keeps_half_read` a reading that was stopped waits."""
        if not self.keeps_half_read or (self.half_read is None and start is None):
            yield from self._read(turn, callbacks, start)
            return
        half, self.half_read = self.half_read, None
        if half is None:
            half = HalfRead(turn, start, self._asked, callbacks)
            half.slices = self._read(turn, half.callbacks, start)
        missed: float | None = None
        try:
            while half.go_on(callbacks, missed):
                self.half_read = None if half.asked is None else half
                require_uncancelled(callbacks.cancel)
                missed = yield
                self.half_read = None
        finally:
            if self.half_read is None:
                half.end()
            else:
                half.leave()

    def end_step(self, config: EngineConfig) -> None:
        """As of the context, before another turn; before one that is half read it has been done."""
        if self.half_read is None or self.half_read.asked[1] != config.settings:
            self.give_up_reading()
            self.context.end_step(config)

    def goes_on(self, ids: list[int], config: EngineConfig, *, answers: bool = True) -> bool:
        """Whether a turn that reads `ids` is the one that is half read; one that is not is given
        up."""
        half = self.half_read
        if half is not None and half.asked == (ids, config.settings, answers):
            return True
        self.give_up_reading()
        return False

    def give_up_reading(self) -> None:
        """Be as before what is half read."""
        half, self.half_read = self.half_read, None
        if half is not None:
            half.end()

    def _read(self, turn: Turn, callbacks: Callbacks, start: Checkpoint | None) -> Slices[None]:
        before = len(self.context.token_ids)
        try:
            yield from self.context.read_in_slices(turn, callbacks)
        except BaseException:
            if start is not None and start is not self.here:
                self.context.release(start)
            raise
        self.branch.was_read(before, len(self.context.token_ids))
        self._clear_position_state()
        self.branch.prefilled_ids, self.branch.prefill_start = [], None

    read = whole(read_in_slices)

    def say(self, start: Checkpoint, text: str) -> Node:
        """Put a message that was read at the end of the branch."""
        node = Node(self.branch.tip, start, text, len(self.context.token_ids))
        self.branch.tip = node
        return node

    def fork(self, branch: Branch, config: EngineConfig) -> None:
        """Add a branch and make it the current one."""
        self.give_up_reading()
        left = self.branch
        self.context.release(left.end)
        left.token_ids, left.end = [*self.context.token_ids], self.context.checkpoint(config)
        self.branches.append(branch)
        self._left, self.current = self.current, len(self.branches) - 1
        self._clear_position_state()

    def continue_answer(self, config: EngineConfig, callbacks: Callbacks) -> Turn:
        """Read what is pending of the last answer; returns the turn that goes on with it.

        Raises:
            SettingError: it has ended, or is held to a schema; and as `Turn`.
        """
        self.branch.require(len(self.branch.nodes))
        self.give_up_reading()
        self.context.end_step(config)
        pending = [*self.context.pending_ids]
        if not pending or pending[-1] in self.context.model.stop_ids:
            raise SettingError("the last answer has ended: there is nothing to go on with")
        if config.settings.schema:
            raise SettingError(
                "an answer by a schema cannot go on where it was cut: answer it again, with more "
                "tokens"
            )
        said = len(self.context.token_ids) + len(pending)
        turn = self.next_turn(pending, config)
        turn.go_on(max(0, said - self.branch.nodes[-1].prompt_end))
        self.read(turn, callbacks)
        return turn

    def redraw(self, config: EngineConfig, callbacks: Callbacks) -> Turn | None:
        """Go back before the last answer, for another. Returns the turn to answer again; None if
        the message has to be read again, and the context is before it."""
        nodes, prompt, turn = self.branch.nodes, self.prompt, self.context.turn
        self.prompt = None
        self.fork(self.branch.cut(len(nodes) - 1), config)
        if prompt is not None and turn is not None:
            if self.context.seek_answer(prompt, turn, config):
                self.prompt = prompt
                return turn
            self.context.release(prompt)
        self._seek_to(nodes[-1].start, config, callbacks)
        return None

    def seek(
        self, number: int, start: Checkpoint, config: EngineConfig, callbacks: Callbacks
    ) -> None:
        """Begin a branch with the messages before `number`, counted from 0, and go to `start`."""
        self.fork(self.branch.cut(number), config)
        self._seek_to(start, config, callbacks)

    def undo(self, config: EngineConfig, callbacks: Callbacks) -> Node:
        """Forget the last message and its answer; returns them."""
        nodes = self.branch.nodes
        self._forget_from(len(nodes) - 1, nodes[-1].start, config, callbacks)
        return nodes[-1]

    def forget_ahead(self, config: EngineConfig, callbacks: Callbacks) -> None:
        """Forget what was read ahead of the next message, if anything was. Raises SettingError if
        the cache was compacted since."""
        self.give_up_reading()
        if not self.branch.prefilled_ids:
            return
        start = self.branch.prefill_start
        if start is None:
            raise SettingError("the cache was compacted since: what was read ahead cannot go")
        self._forget_from(len(self.branch.nodes), start, config, callbacks)

    def _forget_from(
        self, number: int, start: Checkpoint, config: EngineConfig, callbacks: Callbacks
    ) -> None:
        self.seek(number, start, config, callbacks)
        self.current = self._left
        self.context.release(self.branch.end)
        self.branches[self.current] = self.branches.pop()

    def switch(self, branch: int, config: EngineConfig, callbacks: Callbacks) -> None:
        """Go on with another branch."""
        chosen = whole_number(branch)
        if chosen is None or not 0 <= chosen < len(self.branches):
            called, count = repr(branch) if chosen is None else chosen + 1, len(self.branches)
            raise SettingError(f"there is no branch {called}: there are {count} of them")
        if chosen == self.current:
            return
        target = self.branches[chosen]
        common, end = target.common(self.branch), target.end
        self.fork(target.cut(target.frozen_upto + len(common)), config)
        ancestors = [node.start for node in reversed(common)]
        assert end is not None
        self._seek_branch(target, target.token_ids, end, ancestors, config, callbacks)
        self.branches.pop()
        self.current = chosen
        self.context.release(end)

    def _seek_to(self, start: Checkpoint, config: EngineConfig, callbacks: Callbacks) -> None:
        left = self.branches[self._left]
        assert left.end is not None
        ids = [*left.token_ids, *left.end.pending_ids][: start.seen]
        ancestors = [node.start for node in left.reachable if node.start.number < start.number]
        if start.prefill_start is not None:
            ancestors.append(start.prefill_start)
        self._seek_branch(left, ids, start, ancestors[::-1], config, callbacks)
        self.branch.prefilled_ids = [*start.prefilled_ids]
        self.branch.prefill_start, self.here = start.prefill_start, start

    def _seek_branch(
        self,
        branch: Branch,
        ids: list[int],
        end: Checkpoint,
        ancestors: Sequence[Checkpoint],
        config: EngineConfig,
        callbacks: Callbacks,
    ) -> None:
        # If it fails, the conversation is at an earlier message, or where it was.
        before = self.context.cache
        try:
            self.context.seek(ids, end, ancestors, branch.prefill_boundaries, config, callbacks)
        except BaseException:
            if self.context.cache is before:
                self.branches.pop()
                self.current = self._left
                raise
            seen = len(self.context.token_ids)
            number = sum(node.start.seen < seen for node in branch.reachable)
            self.branches[self.current] = branch.cut(branch.frozen_upto + number)
            self.here = None
            raise

    def _clear_position_state(self) -> None:
        # What was only true at the last position is forgotten.
        self.context.release(self.prompt)
        self.prompt = self.here = None
