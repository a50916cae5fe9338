"""What an answer was made from, as kept beside the conversation: sentences, metrics, and the data
of its pictures."""

from dataclasses import replace
from typing import Any

from kvlite.conversation.endings import Remedies
from kvlite.conversation.library import Library
from kvlite.conversation.metrics import GenerationMetrics, brief, told
from kvlite.conversation.record import Record, first_words, keys_of
from kvlite.conversation.session import Session
from kvlite.conversation.sources import Source
from kvlite.memory.free import is_oom

from .kept import Look, kept_map, look

# How users of the page go on with an answer that was cut.
_REMEDIES = Remedies(
    "Continue",
    "Longest answer in the settings",
    "compact under When it gets too long in the settings",
)
# Characters kept of a document before a passage, and as many behind it.
AROUND = 4_000


def look_at(session: Session) -> Look | None:
    """What the cache holds now; None where there is no memory even for that."""
    try:
        return look(session.talk.cache, session.talk.model.shape.window_sizes)
    except Exception as error:
        if not is_oom(error):
            raise
        return None


def account_of(
    metrics: GenerationMetrics, before: Look | None, session: Session, reading_s: float = 0.0
) -> dict[str, Any]:
    """The account of an answer that has just ended, as plain values: `before` is what the cache
    held when the question had been read, `reading_s` the time that reading its documents took."""
    since_enter = replace(metrics, time_to_first_token_s=metrics.time_to_first_token_s + reading_s)
    account: dict[str, Any] = {
        "brief": brief(since_enter, _REMEDIES),
        "told": [*told(since_enter, _REMEDIES)],
        "ledger": metrics.to_json(),
        "question": first_words(session.messages[-1].text),
    }
    if session.sources:
        account["sources"] = [_with_context(each) for each in session.sources]
    kept_all = metrics.kept_entries_mean >= metrics.seen_tokens
    if not kept_all and (after := look_at(session)) is not None:
        account["kept"] = kept_map(before, after).to_json()
    return account


def tokens_read(store: Library, record: Record) -> int:
    """Tokens that a conversation had at its last answer; 0 before the first."""
    for key in reversed(keys_of(record.said)):
        if account := store.account(record.id, key):
            return int(account.get("ledger", {}).get("seen_tokens", 0))
    return 0


def _with_context(source: Source) -> dict[str, Any]:
    text, start, end = source.document.text, source.start, source.end
    around = {
        "before": text[max(0, start - AROUND) : start],
        "passage": text[start:end],
        "after": text[end : end + AROUND],
    }
    return source.to_json() | around
