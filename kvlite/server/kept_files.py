"""Conversations of a server on disk, in the library."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvlite.conversation.file_info import about
from kvlite.conversation.library import Library
from kvlite.conversation.record import SERVER, Record
from kvlite.errors import KvliteError, SettingError
from kvlite.server.kept import Kept

_LOG = logging.getLogger("kvlite.server")


class KeptFiles:
    """What a server has in a library; that of other servers and models counts, too, and goes before
    its own."""

    def __init__(self, library: Library, most: int) -> None:
        """`most` bytes are taken of the disk."""
        self.library, self.most = library, most
        self._told = set[tuple[str, str]]()

    def store(self, kept: Kept) -> bool:
        """Write a conversation to disk, in place of what was there; whether that went well."""
        assert kept.talk is not None
        try:
            with self._entry_of(kept) as record:
                path = self.library.whole(record.id)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                kept.file_bytes = kept.talk.save(path, most=self.most)
                kept.ends = about(path).ends
                self.library.save(record)
        except (KvliteError, OSError) as error:
            said = "a conversation of %d tokens is not kept on disk: %s"
            self.tell(said, error, len(kept.ids))
            return False
        self._told.clear()
        kept.id, kept.path, kept.changed = record.id, path, False
        return True

    @contextmanager
    def _entry_of(self, kept: Kept) -> Iterator[Record]:
        """The record that a conversation is kept with, which nobody else writes meanwhile. It is a
        new one if somebody does, or went on with it, or it has gone."""
        record = self.library.new()
        if kept.id and self.library.has(kept.id):
            with suppress(SettingError), self.library.hold(kept.id):
                found = self.library.record(kept.id)
                record = found if found.made_by == SERVER else record
        record.made_by, record.earlier, record.times = SERVER, 0, [*kept.times]
        first = next((each.text for each in kept.said if each.role == "user"), "")
        if all(each.text != first for each in record.said[:2]):
            record.name = ""  # of what was said there before
        record.update([[*kept.said]], 0, kept.settings, ())
        record.earlier = len(record.said)
        record.name_after(first)
        with self.library.hold(record.id):
            yield record

    def keep_within(self, kept: Sequence[Kept]) -> None:
        """Remove files beyond the limit: those of conversations that are in memory, too, then those
        of the least recently used."""
        room = self.most
        for each in sorted(kept, key=lambda each: (each.talk is not None, -each.used)):
            if not each.id or each.busy:
                continue
            room -= each.file_bytes
            if room < 0:
                self.forget(each)
        for id, size in self._of_others(kept):
            room -= size
            if room < 0:
                self._remove(id)

    def forget(self, kept: Kept) -> None:
        """Remove a conversation's file, if it has one of its own."""
        if kept.id:
            self._remove(kept.id)
        kept.id, kept.path = "", None

    def tell(self, said: str, error: Exception, *values: object) -> None:
        """Log that the disk failed, once until that changes."""
        why = f"{type(error).__name__} {getattr(error, 'errno', None) or error}"
        if (said, why) not in self._told:
            self._told.add((said, why))
            _LOG.warning(said, *values, error)

    def _of_others(self, kept: Sequence[Kept]) -> list[tuple[str, int]]:
        """Entries of other servers and models and their bytes, those last used first."""
        own, found = {each.id for each in kept}, list[tuple[str, int]]()
        for record in self.library.records():
            if record.made_by == SERVER and record.id not in own:
                with suppress(OSError):
                    found.append((record.id, self.library.whole(record.id).stat().st_size))
        return found

    def _remove(self, id: str) -> None:
        try:
            with self.library.hold(id):
                if self.library.record_or_new(id).made_by == SERVER:
                    self.library.remove(id)
        except (OSError, SettingError) as error:
            self.tell("what is not needed stays on disk: %s", error)
