"""What kept conversations have in common with a prompt. Only tokens count."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlite.config.settings import Settings
from kvlite.conversation.fork import begun
from kvlite.conversation.prefix import common, cuts_anywhere
from kvlite.model.load import LoadedModel
from kvlite.server.kept import SHARED, Kept


@dataclass(frozen=True)
class Match:
    """A conversation, and a prompt that may begin with it.

    Attributes:
        same: tokens that they have in common.
        known: how many of these need not be read again, at most.
    """

    kept: Kept
    same: int
    known: int

    @property
    def is_left(self) -> bool:
        """Whether the prompt had better begin with a copy of it."""
        kept, same = self.kept, self.same
        return self.known >= SHARED and (kept.busy or kept.is_left_by(same))

    @property
    def is_gone_on_with(self) -> bool:
        """Whether the prompt may go on there."""
        return not self.kept.busy and self.kept.is_gone_on_with(self.known)


def matches(
    kept: Iterable[Kept], ids: Sequence[int], settings: Settings, model: LoadedModel
) -> list[Match]:
    """Conversations with these settings that may be used now, the best first."""
    found = list[Match]()
    for each in kept:
        if each.settings == settings and each.lends:
            same = common(each.ids, ids)
            found.append(Match(each, same, _known(each, same, model)))
    return sorted(found, key=lambda each: (-each.known, -each.same, -each.kept.used))


def _known(kept: Kept, same: int, model: LoadedModel) -> int:
    if same < SHARED or same == len(kept.ids) or kept.half_read is not None:
        return same
    if kept.talk is not None:
        return begun(kept.talk, same)
    if kept.ends is not None:
        return max((each for each in kept.ends if each <= same), default=0)
    return same if cuts_anywhere(model) else 0
