"""What an answer was made from, as it is kept beside the conversation: words, numbers, and what
its pictures are drawn from."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from kvlite.conversation.metrics import GenerationMetrics, Piece, brief, told
from kvlite.conversation.session import Message, Session
from kvlite.memory.free import is_oom
from kvlite.model.chat_template import said_tokens

from ..storage.record import first_words
from .kept import Look, kept_map, look, token_shares
from .pages import Pages, page_shares, pages_of

T = TypeVar("T")

# Where someone at the page has longer answers.
_LONGER = "Max tokens in the settings"


class CacheObserver:
    """Looks at the cache when a question has been read, and when it has been answered."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.before: Look | None = None
        self.begun = False

    def saw(self, piece: Piece) -> None:
        """A piece of the answer came: at the first one the question has been read."""
        if not self.begun:
            self.before, self.begun = self.look(), True

    def look(self) -> Look | None:
        """What the cache holds; None where there is no memory even for that."""
        talk = self.session.talk
        return _if_it_fits(lambda: look(talk.cache, talk.model.shape.windows))


class PageFinder:
    """Where the pages of a conversation's documents are among its tokens; found once each."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._found: dict[tuple[str, bool, str], tuple[Pages, list[int]] | None] = {}

    def pages(self) -> Iterator[tuple[Pages, int]]:
        """Of every message that is about documents: its pages, and where it begins."""
        talk = self.session.talk
        read = np.array(talk.token_ids, np.int64)
        for number, message in enumerate(self.session.messages):
            if not message.documents:
                continue
            found = self._of(message, opening=number == 0)
            if found is not None and (start := _place(read, found[1])) is not None:
                yield found[0], start

    def _of(self, message: Message, *, opening: bool) -> tuple[Pages, list[int]] | None:
        talk = self.session.talk
        tokenizer, system = talk.model.tokenizer, talk.settings.system
        key = message.said, opening, system
        if key not in self._found:
            how: dict[str, Any] = {"opening": opening, "first": opening, "system": system}
            pages = pages_of(tokenizer, message.documents, message.text, **how)
            ids = said_tokens(tokenizer, message.said, **how) if pages is not None else []
            self._found[key] = None if pages is None else (pages, ids)
        return self._found[key]


def account_of(
    metrics: GenerationMetrics, looker: CacheObserver, finder: PageFinder, reading_s: float = 0.0
) -> dict[str, Any]:
    """The answer's account, of plain values.

    Args:
        reading_s: seconds that reading its documents took before.
    """
    read = [f"Its documents were read in {reading_s:.1f} s before that."] if reading_s else []
    account: dict[str, Any] = {
        "brief": brief(metrics, _LONGER),
        "told": [*told(metrics, _LONGER), *read],
        "ledger": metrics.to_json(),
        "question": first_words(looker.session.messages[-1].text),
    }
    before, after = looker.before, looker.look()
    if after is None:
        return account
    account["kept"] = kept_map(before, after).to_json()
    shares = token_shares(before, after)
    account["pages"] = [
        asdict(share)
        for pages, start in finder.pages()
        for share in page_shares(pages, shares, start)
    ]
    return account


def _place(read: Any, ids: list[int]) -> int | None:
    """Where tokens begin among those that were read; None if they are not there as they are, as
    after a conversation outgrew its context."""
    wanted = np.array(ids, np.int64)
    for start in np.flatnonzero(read == wanted[0])[::-1]:
        if np.array_equal(read[start : start + len(wanted)], wanted):
            return int(start)
    return None


def _if_it_fits(work: Callable[[], T]) -> T | None:
    try:
        return work()
    except Exception as error:
        if not is_oom(error):
            raise
    return None
