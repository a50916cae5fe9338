"""A prompt may be left half read by the request that brought it, and go on when it comes again."""

from collections.abc import Generator, Mapping, Sequence
from threading import Event
from time import perf_counter
from typing import Any, cast

from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.prefix import answer_prompt
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks, ReadingBytes


class Prompt:
    """A prompt that is read in a conversation, and answered, for one request after another.

    Attributes:
        talk: the conversation; nobody may look at its cache while it is half read.
        ids, settings: the prompt, and what its answer is made with.
        is_half_read: whether it waits between two slices.
    """

    def __init__(self, talk: Conversation, ids: Sequence[int], settings: Mapping[str, Any]) -> None:
        self.talk, self.ids, self.settings = talk, [*ids], {**settings}
        self.is_half_read = False
        self._follower, self._left = NO_CALLBACKS, perf_counter()
        self._pieces: Generator[Piece | None, float | None] | None = None

    def is_asked(self, ids: Sequence[int], settings: Mapping[str, Any]) -> bool:
        """Whether it is this prompt, for the same answer."""
        return self.ids == [*ids] and self.settings == settings

    def pieces(self, follower: Callbacks) -> Generator[Piece | None]:
        """What is still to come, as from `answer_prompt`. Left between two slices of reading it can
        be asked for once more; left elsewhere it ends."""
        missed = perf_counter() - self._left if self.is_half_read else None
        self._follower = follower
        if self._pieces is None:
            told = self._progress, self._notify, cast(Event, self), self._reading
            callbacks = Callbacks(*told, follower.planned)
            self._pieces = answer_prompt(self.talk, self.ids, callbacks=callbacks, **self.settings)
        try:
            while True:
                piece = self._pieces.send(missed)
                self.is_half_read, missed = piece is None, None
                yield piece
        except StopIteration:
            return
        except GeneratorExit:
            if not self.is_half_read:
                self._pieces.close()
            self._follower, self._left = NO_CALLBACKS, perf_counter()
            raise
        except BaseException:
            self.is_half_read = False
            raise

    def give_up(self) -> None:
        """Leave the conversation as it was before, if it is half read."""
        self.is_half_read = False
        if self._pieces is not None:
            self._pieces.close()

    def is_set(self) -> bool:
        """Whether reading, or the answer, ends at once: between slices it can just be left."""
        return self._follower.cancelled and not self.is_half_read

    def _progress(self, done: int, total: int) -> None:
        if self._follower.progress is not None:
            self._follower.progress(done, total)

    def _notify(self, note: str) -> None:
        self._follower.say(note)

    def _reading(self, held: ReadingBytes) -> None:
        if self._follower.reading is not None:
            self._follower.reading(held)
