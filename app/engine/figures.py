"""What the conversation in memory holds and does, at one moment."""

from dataclasses import dataclass

from kvlite.conversation.session import Session
from kvlite.planner.usage import Holding, Part, holding


@dataclass(frozen=True)
class Figures:
    """Of the conversation in memory, taken by the engine's thread and looked at from others.

    Attributes:
        owner, id: whose, and which.
        holding: what it holds, and where.
        seen, most: tokens it has, and those the model was trained for.
        kv_bytes, full_kv_bytes: of its cache, and if nothing were dropped.
        host_kv_bytes: of host memory, or disk, that everything is kept in to be recalled.
        first_token_s, tokens_per_s: of the answer that comes, or came last.
        fallbacks: what was given up so far because memory was short.
    """

    owner: str
    id: str
    holding: Holding
    seen: int
    most: int
    kv_bytes: int
    full_kv_bytes: int
    host_kv_bytes: int
    first_token_s: float | None
    tokens_per_s: float | None
    fallbacks: tuple[str, ...]


def figures_of(owner: str, id: str, session: Session, weights: Part) -> Figures:
    """As they are now; nobody may change the conversation meanwhile.

    Args:
        weights: the model's.
    """
    talk, last, shape = session.talk, session.last, session.runner.shape
    cache, store = talk.cache, talk.store
    return Figures(
        owner=owner,
        id=id,
        holding=holding(talk.model, cache, store, talk.checkpoint_bytes, weights=weights),
        seen=cache.seen,
        most=shape.max_context,
        kv_bytes=cache.nbytes,
        full_kv_bytes=shape.full_kv_bytes(cache.seen, talk.model.dtype.itemsize),
        host_kv_bytes=0 if store is None or not store.begun else store.nbytes,
        first_token_s=None if last is None else last.time_to_first_token_s,
        tokens_per_s=None if last is None else last.decode_tokens_per_s,
        fallbacks=tuple(talk.oom_policy.taken),
    )
