"""What an answer was made from, as kept beside the conversation: sentences, metrics, and the data
of its pictures."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from kvlite.conversation.metrics import GenerationMetrics, brief, told
from kvlite.conversation.session import Message, Session
from kvlite.memory.free import is_oom
from kvlite.model.chat_template import said_tokens

from ..storage.record import first_words
from .kept import Look, kept_map, look, token_shares
from .pages import Pages, page_shares, pages_of

# Where users of the page allow longer answers.
_LONGER = "Max tokens in the settings"


class PageFinder:
    """Finds the pages of a conversation's documents among its tokens, and remembers them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._found: dict[tuple[str, bool, str], tuple[Pages, list[int]] | None] = {}

    def pages(self) -> Iterator[tuple[Pages, int]]:
        """The pages of every message about documents, and the position where it begins."""
        read = np.array(self.session.talk.token_ids, np.int64)
        for number, message in enumerate(self.session.messages):
            if message.documents and (found := self._of(message, opening=number == 0)):
                pages, ids = found
                if (start := _start(read, ids)) is not None:
                    yield pages, start

    def _of(self, message: Message, *, opening: bool) -> tuple[Pages, list[int]] | None:
        talk = self.session.talk
        tokenizer, system = talk.model.tokenizer, talk.settings.system
        key = message.said, opening, system
        if key not in self._found:
            how: dict[str, Any] = {"opening": opening, "first": opening, "system": system}
            pages = pages_of(tokenizer, message.documents, message.text, **how)
            ids = [] if pages is None else said_tokens(tokenizer, message.said, **how)
            self._found[key] = None if pages is None else (pages, ids)
        return self._found[key]


def look_at(session: Session) -> Look | None:
    """What the cache holds now; None where there is no memory even for that."""
    try:
        return look(session.talk.cache, session.talk.model.shape.windows)
    except Exception as error:
        if not is_oom(error):
            raise
        return None


def account_of(
    metrics: GenerationMetrics, before: Look | None, finder: PageFinder, reading_s: float = 0.0
) -> dict[str, Any]:
    """The account of an answer that has just ended, as plain values: `before` is what the cache
    held when the question had been read, `reading_s` the time that reading its documents took."""
    session = finder.session
    since_enter = replace(metrics, time_to_first_token_s=metrics.time_to_first_token_s + reading_s)
    read = [f"Reading the documents took {reading_s:.1f} s of that."] if reading_s else []
    account: dict[str, Any] = {
        "brief": brief(since_enter, _LONGER),
        "told": [*told(since_enter, _LONGER), *read],
        "ledger": metrics.to_json(),
        "question": first_words(session.messages[-1].text),
    }
    if (after := look_at(session)) is not None:
        account["kept"] = kept_map(before, after).to_json()
        shares = token_shares(before, after)
        account["pages"] = [
            asdict(share)
            for pages, start in finder.pages()
            for share in page_shares(pages, shares, start)
        ]
    return account


def _start(read: Any, ids: list[int]) -> int | None:
    """Where tokens begin among those that were read; None if they are not there as they were said,
    for instance after a conversation outgrew its context."""
    wanted = np.array(ids, np.int64)
    for start in np.flatnonzero(read == wanted[0])[::-1]:
        if np.array_equal(read[start : start + len(wanted)], wanted):
            return int(start)
    return None
