"""Conversations that may go on: a request goes to the one that has read most of it.

Those with much to read again stay in memory, then on disk, each up to a limit. Short ones, such as
requests for a title, have places of their own and never take one of these.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from kvlite.config.atomic_file import sweep
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.file_info import about
from kvlite.conversation.library import Library
from kvlite.conversation.metrics import Piece
from kvlite.conversation.prefix import answer_prompt, common, hold_in_tokens, known_ids
from kvlite.conversation.record import SERVER, StoredMessage, ToldTimes
from kvlite.conversation.runner import Runner
from kvlite.conversation.snapshot import Snapshot
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.sampling import DRAWING
from kvlite.errors import ContextError, KvliteError, OutOfMemory, SettingError, Stopped
from kvlite.memory.device_budget import spare_bytes
from kvlite.memory.free import release_memory
from kvlite.memory.oom import alone
from kvlite.server.kept import SHORT, Asked, Kept, held_bytes
from kvlite.server.kept_files import KeptFiles
from kvlite.server.matching import Match, matches

_LOG = logging.getLogger("kvlite.server")
# What is said of tokens that are read again for a date or time.
_CHANGED = (
    "up to %d tokens are read again as a date or time of now has changed: --stable-prefix, or "
    "kvlite.stable_prefix in requests, keeps the earlier one"
)
# Seconds of reading that are worth writing what was read.
SAVED_AFTER = 30.0
# How many short conversations are kept.
SHORT_ONES = 8
# Errors after which a conversation goes on.
_HARMLESS = (ContextError, OutOfMemory, SettingError, Stopped)


class Conversations:
    """All that may go on with one model. One thread uses it."""

    def __init__(
        self,
        runner: Runner,
        keep: int,
        keep_disk: int,
        library: Library,
    ) -> None:
        """The `library` has those of all servers and models; those of others count against
        `keep_disk`, and go before its own."""
        self.runner, self.keep, self.files = runner, keep, KeptFiles(library, keep_disk)
        self.kept: list[Kept] = []
        self._used = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the model's device that would be free without them; on a CPU that is all memory
        that they take."""
        on_host = self.runner.model.device.type == "cpu"
        kept = [*self.kept]  # other threads ask, too
        return sum(each.memory_bytes if on_host else each.device_bytes for each in kept)

    def answer(
        self,
        ids: Sequence[int],
        settings: Mapping[str, Any],
        callbacks: Callbacks,
        *,
        said: Sequence[StoredMessage] = (),
        times: Sequence[ToldTimes] = (),
        parting: int = 0,
        ignore_eos: bool = False,
    ) -> Generator[tuple[Piece | None, Conversation]]:
        """Answer a prompt, by the usual settings with these changed, in the conversation that has
        read most of it. Pieces and errors are those of `answer_prompt`; those of OutOfMemory, too,
        while others are answered that will end. A prompt that is left half read goes on where it
        was if it is the next one that is asked, unless memory is limited to one (`--vram`).
        `callbacks.planned` is told what memory lacks once nothing else can go. `said` is the prompt
        for people, and `times` what it tells of now; other prompts may go on otherwise after
        `parting` tokens."""
        chosen = self.runner.settings.after_load(settings)
        lasting, given = self._lasting(chosen), {**settings, "ignore_eos": ignore_eos}
        asked = [*ids], given
        now = self._left(asked) or self._found(ids, lasting, times, parting)
        if now not in self.kept:
            self.kept.append(now)
        self._used += 1
        before, now.ids, now.used, now.busy, now.changed = now.ids, [*ids], self._used, True, True
        now.prompt, now.said, now.times, text, broken = len(ids), said, times, "", True
        now.half_read, now.reads, now.saved = None, True, perf_counter()
        try:
            self._make_room(now)
            have = partial(self.have, now=now, more=callbacks.planned)
            talk = self._opened(now, have)
            talk.history.keeps_half_read = self.runner.plans_for_others
            policy = talk.context.oom_policy
            policy.waits = partial(self._has_others, now)
            told = replace(callbacks, planned=have)
            keep = partial(self._part_read, now)
            begin = partial(answer_prompt, callbacks=told, partings=now.partings, part_read=keep)
            answer = begin(talk, ids, **given)
            with closing(answer) as pieces:
                for piece in pieces:
                    if piece is not None:
                        policy.waits, text = alone, text + piece.text
                        now.reads = False
                    yield piece, talk
            broken = False
        except (*_HARMLESS, GeneratorExit):
            broken = False
            raise
        finally:
            now.busy = now.reads = False
            if text:
                now.said = [*said, StoredMessage("assistant", text)]
            if now.talk is not None and now.talk.history.half_read is not None:
                now.half_read = asked
            else:
                self._settle(now, before, broken=broken)
            self._make_room(now)

    def _part_read(self, now: Kept) -> None:
        """Write to disk what took long to read, so that it outlives a server that is killed; not
        while others are answered."""
        if perf_counter() - now.saved < SAVED_AFTER or not self.files.most or self._has_others(now):
            return
        self.files.store(now)
        now.changed, now.saved = True, perf_counter()

    def have(
        self, nbytes: int, now: Kept | None = None, more: Callable[[int], None] | None = None
    ) -> None:
        """Have so many bytes of the device free for what is read `now`: as many as that takes leave
        memory, the least recently used first, before `more` is asked for them. Raises OutOfMemory
        while others are answered that take it."""
        devices = self.runner.model.all_devices
        others = (each for each in self.kept if each is not now and not each.busy)
        for each in sorted((each for each in others if each.talk), key=lambda each: each.used):
            if nbytes <= spare_bytes(devices):
                return
            self._leave(each)
            release_memory(devices[0])
        if more is not None and nbytes > spare_bytes(devices):
            more(nbytes)
        if self._has_others(now) and nbytes > spare_bytes(devices):
            raise OutOfMemory("there is no room beside the answers that are coming")

    def _has_others(self, now: Kept | None) -> bool:
        """Whether others are answered, which will end."""
        return any(each.busy for each in self.kept if each is not now)

    def _settle(self, kept: Kept, before: Sequence[int] = (), *, broken: bool = False) -> None:
        """Know what a conversation has read, which is as `before` if it was not opened; forget it
        if that is nothing, or it is broken."""
        kept.ids = [*before] if kept.talk is None else known_ids(kept.talk)
        if broken or not kept.ids:
            self._drop(kept)

    def _left(self, asked: Asked) -> Kept | None:
        """The conversation where this prompt was left half read. Any other prompt that was is given
        up, as it takes memory."""
        for each in [*self.kept]:
            if each.half_read == asked:
                return each
            self._give_up(each)
        return None

    def _give_up(self, kept: Kept) -> None:
        """Leave a conversation as it was before the prompt that is half read."""
        if kept.half_read is not None and kept.talk is not None:
            kept.talk.history.give_up_reading()
            kept.half_read = None
            self._settle(kept)

    def waits(self, ids: Sequence[int], settings: Mapping[str, Any]) -> bool:
        """Whether a prompt had better wait for a reading, or an answer, as else much were read
        again."""
        lasting = self._lasting(self.runner.settings.after_load(settings))
        busy = [each for each in self.kept if each.busy and each.settings == lasting]
        if not any(each.is_awaited_by(ids, 0) for each in busy):
            return False
        known = len(ids) - self.unread(ids, settings)
        return any(each.is_awaited_by(ids, known) for each in busy)

    def unread(self, ids: Sequence[int], settings: Mapping[str, Any]) -> int:
        """How many tokens of a prompt nothing has read that it may begin with."""
        lasting = self._lasting(self.runner.settings.after_load(settings))
        found = matches(self.kept, ids, lasting, self.runner.model)
        return len(ids) - max((each.known for each in found), default=0)

    def _found(
        self, ids: Sequence[int], settings: Settings, times: Sequence[ToldTimes], parting: int
    ) -> Kept:
        """The conversation to go on with, which has most of the prompt and loses less than that; or
        a new one, which begins with what it can."""
        found = matches(self.kept, ids, settings, self.runner.model)
        most = max((each.same for each in found), default=0)
        lost = max((each.kept.would_save(ids, times) for each in found), default=0) - most
        if lost > SHORT:
            _LOG.info(_CHANGED, lost)
        chosen = next(filter(None, (self._taken(each, ids) for each in found)), None)
        if chosen is None:
            said = "a new conversation of %d tokens; the most that another shares is %d"
            _LOG.info(said, len(ids), most)
            chosen = Kept([], settings)
        chosen.partings = most, parting
        return chosen

    def _taken(self, match: Match, ids: Sequence[int]) -> Kept | None:
        """What goes on with a conversation, or begins as it did; None if neither is better than
        nothing."""
        kept, same = match.kept, match.same
        if match.is_left and (made := self._forked(kept, ids, same)) is not None:
            return made
        if not match.is_gone_on_with:
            return None
        _LOG.info("%d of %d tokens are known", match.known, len(ids))
        if same < min(len(ids), len(kept.ids)):
            said = "the first different token is %d of the %d of that conversation"
            _LOG.info(said, same + 1, len(kept.ids))
        return kept

    def _forked(self, kept: Kept, ids: Sequence[int], same: int) -> Kept | None:
        """A conversation that begins as another one did, which stays as it is; None if there is no
        room for both, or what was read cannot be copied."""
        longest = len(ids) + self.runner.settings.planned_tokens
        try:
            made = kept.shared(same, longest, partial(self._has_room_beside, kept))
        except (KvliteError, MemoryError) as error:
            _LOG.info("what another conversation has read is not shared: %s", error)
            return None
        if made is not None:
            _LOG.info(
                "%d of %d tokens are known from a conversation of %d, which stays as it is",
                *(min(same, len(made.ids)), len(ids), len(kept.ids)),
            )
        return made

    def _has_room_beside(self, kept: Kept, nbytes: int) -> bool:
        if not self.runner.plans_for_others:
            return False
        self.have(nbytes, kept)
        return nbytes <= spare_bytes(self.runner.model.all_devices)

    def _opened(self, kept: Kept, have: Callable[[int], None]) -> Conversation:
        """A conversation in memory; a new one if its file cannot be opened. Raises as `have`."""
        if kept.talk is None and kept.path is not None:
            try:
                kept.talk = self._read_back(kept.path, partial(have, kept.file_bytes))
                hold_in_tokens(kept.talk)
                kept.talk.settings = kept.settings
            except (KvliteError, OSError) as error:
                if isinstance(error, OutOfMemory) and self._has_others(kept):
                    raise
                _LOG.warning("%s is not gone on with: %s", kept.path, error)
                self.files.forget(kept)
            if kept.is_lent:
                kept.path = None
        if kept.talk is None:
            kept.talk = Conversation(self.runner.model, kept.settings)
        return kept.talk

    def _read_back(self, path: Path, make_room: Callable[[], None]) -> Conversation:
        try:
            return self.runner.open(path)
        except OutOfMemory:
            pass  # and the traceback is gone
        make_room()
        return self.runner.open(path)

    def _make_room(self, now: Kept) -> None:
        """Keep within the limits beside a conversation; the least recently used go first. It raises
        nothing: answers do not depend on it."""
        try:
            self._keep_within(now)
        except Exception as error:
            self.files.tell(
                "room was not made for a conversation of %d tokens: %s", error, len(now.ids)
            )

    def _keep_within(self, now: Kept) -> None:
        if now.talk is not None:
            now.device_bytes, now.host_bytes = held_bytes(now.talk)
        idle = (each for each in self.kept if each is not now and each.is_idle)
        others = sorted(idle, key=lambda each: -each.used)
        busy = (each for each in self.kept if each is not now and not each.is_idle)
        total = (now.memory_bytes or now.file_bytes) + sum(each.memory_bytes for each in busy)
        for each in [each for each in others if each.is_short][SHORT_ONES - 1 :]:
            self._drop(each)
        for each in [each for each in others if each.talk is not None and not each.is_short]:
            total += each.memory_bytes
            if total > self.keep:
                self._put_away(each)
        self._keep_within_disk()

    def _keep_within_disk(self) -> None:
        self.files.keep_within([*self.kept])
        self.kept[:] = [each for each in self.kept if each.busy or each.talk or each.path]

    def _leave(self, kept: Kept) -> None:
        self._give_up(kept)
        if kept in self.kept and kept.is_short:
            self._drop(kept)
        elif kept in self.kept and kept.talk is not None:
            self._put_away(kept)

    def _drop(self, kept: Kept) -> None:
        self.files.forget(kept)
        self.kept.remove(kept)

    def _put_away(self, kept: Kept) -> None:
        """Move a conversation from memory to disk; it is forgotten if that fails."""
        if (kept.changed or kept.path is None) and not self.files.store(kept):
            self._drop(kept)
        kept.talk, kept.device_bytes, kept.host_bytes = None, 0, 0

    def store_idle(self) -> bool:
        """Write the long conversation to disk that has been idle longest since it went on; whether
        there was one. So it outlives a server that is killed."""
        idle = (each for each in self.kept if each.is_idle and not each.is_short)
        changed = [each for each in idle if each.talk is not None and each.changed]
        if not changed or not self.files.most:
            return False
        found = min(changed, key=lambda each: each.used)
        if not self.files.store(found):
            found.changed = False  # not tried again before it goes on
        self._keep_within_disk()
        return True

    def lend(self, path: Path) -> None:
        """Let a prompt go on with a document of the library, unless it is here already."""
        try:
            found = self._on_disk(path)
        except (KvliteError, OSError, ValueError) as error:
            _LOG.warning("%s of the library is read anew: %s", path, error)
            return
        alike = (each for each in self.kept if each.settings == found.settings)
        if all(common(each.ids, found.ids) < len(found.ids) for each in alike):
            self._used += 1
            found.used = self._used
            self.kept.append(found)

    def resume(self) -> None:
        """Find what the library has of this model; what no server put there stays as it is."""
        identity = self.runner.identity
        for record in reversed(self.files.library.records()):
            path = self.files.library.whole(record.id)
            try:
                sweep(path.parent)
                if not path.is_file() or about(path).identity != identity:
                    continue
                found = self._on_disk(path)
            except (KvliteError, OSError, ValueError) as error:
                _LOG.warning("%s is not gone on with: %s", path, error)
                continue
            self._used += 1
            found.used, found.said, found.times = self._used, record.said, record.times
            if record.made_by == SERVER:
                found.id = record.id
            self.kept.append(found)

    def set_aside(self) -> None:
        """Leave memory: what is long goes to disk, the last used first, as far as there is room."""
        for each in sorted(self.kept, key=lambda each: -each.used):
            self._leave(each)
        self._keep_within_disk()

    def _on_disk(self, path: Path) -> Kept:
        with Snapshot(path) as saved:
            ids = saved.known_ids(self.runner.model)
            settings = self._lasting(saved.settings(self.runner.settings))
            made = Kept(ids, settings, path=path, changed=False)
            made.file_bytes, made.ends = saved.about.nbytes, saved.about.ends
            return made

    def _lasting(self, settings: Settings) -> Settings:
        """Settings without those that end with an answer."""
        return settings.replace({name: getattr(self.runner.settings, name) for name in _PASSING})


# Settings that end with the answer.
_PASSING = (*DRAWING, "max_new_tokens", "reserve_tokens")
