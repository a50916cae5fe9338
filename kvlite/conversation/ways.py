"""Which way a conversation is on, and how it gets to another."""

from collections.abc import Sequence

from kvlite.config.arguments import whole_number
from kvlite.conversation.branches import Branch, Path, Said
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.context import Context
from kvlite.conversation.turn import Turn
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError
from kvlite.methods.engine_config import EngineConfig


class Ways:
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
        self.here: Said | None = None
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

    def standing(self, config: EngineConfig) -> Said:
        """Where something that is said now begins."""
        if self.here is not None:
            return self.here
        made = self.context.hold(config)
        return Said(made, len(self.path.messages), [*self.path.ahead], self.path.before)

    def take(self, turn: Turn, callbacks: Callbacks, said: Said | None = None) -> None:
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
            self.path.sealed, self.path.parts = len(self.path.said), []
            self.path.compacted = True
            self._moved()
            self.path.before = None
        return self.context.next_turn(ids, config, answers=answers)

    def leave(self, number: int, config: EngineConfig) -> Path:
        """Go another way from user message `number` on, counted from 0; the one that is left."""
        path = self._kept(config)
        self._begin(path.cut(number))
        return path

    def answer_again(self, number: int, config: EngineConfig) -> tuple[Path, Turn | None]:
        """Leave the answer to the last message, `number` counted from 0; the way that is left, and
        the turn to answer anew, if that needs nothing to be read."""
        read, turn = self.unanswered, self.context.turn
        self.unanswered = None
        left = self.leave(number, config)
        if read is None or turn is None:
            return left, None
        if turn.may_answer_again(config) and self.context.return_to_answering(read):
            turn.begin_again(config)
            self.unanswered = read
            return left, turn
        self.context.leave(read)
        return left, None

    def go_back(self, left: Path, said: Said, config: EngineConfig, callbacks: Callbacks) -> None:
        """Let things stand as where something was said on a way that is left."""
        assert left.end is not None
        heard, point = [*left.token_ids, *left.end.pending], said.checkpoint
        ways = [each.checkpoint for each in left.open if each.messages < said.messages]
        if said.before is not None:
            ways.append(said.before.checkpoint)
        self._go(left, heard[: point.seen], point, ways[::-1], config, callbacks)
        self.path.ahead, self.path.before, self.here = [*said.ahead], said.before, said

    def undo(self, config: EngineConfig, callbacks: Callbacks) -> Said:
        """Forget the last message and its answer; where it began."""
        said = self.path.said[-1]
        left = self.leave(len(self.path.said) - 1, config)
        self.go_back(left, said, config, callbacks)
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
        self._begin(target.cut(target.sealed + len(common)))
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
            self.context.go_to(ids, end, ways, way.stops, config, callbacks)
        except BaseException:
            if self.context.cache is before:
                self.paths.pop()
                self.at = self.former
                raise
            seen = len(self.context.token_ids)
            number = sum(said.checkpoint.seen < seen for said in way.open)
            self.paths[self.at] = way.cut(way.sealed + number)
            self.here = None
            raise
