"""The line at the bottom: context used, the cache, memory, speed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvlite.cli.chat.about_memory import now
from kvlite.cli.chat.bars import bar
from kvlite.config.units import readable
from kvlite.conversation.session import Session

_BAR = 10
# Seconds for which memory is taken to be as it was.
_FRESH = 1.0


@dataclass(frozen=True)
class Status:
    """What the line says.

    Attributes:
        seen, most: tokens of the conversation, and those the model was trained for.
        kv_bytes: of the cache, on the device.
        memory: what the device's is called.
        used, total: its bytes.
        tokens_per_s: of the answer that comes, or came last; None before the first.
    """

    seen: int
    most: int
    kv_bytes: int
    memory: str
    used: int
    total: int
    tokens_per_s: float | None = None


def status_line(status: Status, width: int, *, ascii_only: bool = False) -> str:
    """As much of it as fits into so many columns, the most important first."""
    share = status.used / status.total if status.total else 0.0
    drawn = bar([("used", share)], _BAR, ascii_only=ascii_only)
    context = f"context {status.seen:,}/{status.most:,}"
    parts = [
        context,
        f"KV {readable(status.kv_bytes)}",
        f"{status.memory} {drawn} {readable(status.used)} of {readable(status.total)}",
    ]
    if status.tokens_per_s:
        parts.insert(2, f"{status.tokens_per_s:.1f} tokens/s")
    separator = " | " if ascii_only else " · "
    shown = _joined(parts, separator, width)
    if len(shown.split(separator)) == len(parts):
        return shown
    return _joined([*parts[:-1], f"{status.memory} {share:.0%}"], separator, width)


def _joined(parts: list[str], separator: str, width: int) -> str:
    """As many of them as fit, from the first on."""
    shown = parts[0][:width]
    for part in parts[1:]:
        if len(shown) + len(separator) + len(part) > width:
            break
        shown += separator + part
    return shown


class Gauge:
    """The line of a session, memory looked up once a second at most."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self.session = session
        self.clock = clock
        self._due = float("-inf")

    def line(self, width: int, *, ascii_only: bool = False) -> str:
        """As much as fits."""
        return status_line(self._status(), width, ascii_only=ascii_only)

    def _status(self) -> Status:
        if self.clock() >= self._due:
            self._place = now(self.session)[0]
            self._due = self.clock() + _FRESH
        session, place = self.session, self._place
        last, cache = session.last, session.talk.cache
        return Status(
            seen=cache.seen,
            most=session.runner.shape.max_context,
            kv_bytes=cache.nbytes,
            memory=place.short,
            used=place.used,
            total=place.total,
            tokens_per_s=None if last is None else last.decode_tokens_per_s,
        )
