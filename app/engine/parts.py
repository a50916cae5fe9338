"""Documents that are longer than the model takes, of which the relevant parts can be read."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlite.conversation.relevant_parts import relevant_parts
from kvlite.conversation.retold import Price, seconds_per_token
from kvlite.conversation.session import Session
from kvlite.conversation.turn_config import can_compact
from kvlite.documents import Document
from kvlite.errors import ContextError, KvliteError, SettingError
from kvlite.model.chat_template import text_tokens
from kvlite.model.local_models import models_here
from kvlite.planner.fitting import plan_here
from kvlite.web.work import Work

from ..form import Models

if TYPE_CHECKING:
    from kvlite.web.server_talk import ServerTalk

    from .service import Service

# Tokens that a chat template has around a message.
_AROUND = 32
# Models that are planned for, at most.
_PLANNED = 4
# Tokens of the text whose reading tells how fast the model reads.
_TRIED = 2_048


def parts_for(
    session: "Session | ServerTalk", documents: Sequence[Document], question: str
) -> list[Document]:
    """The parts of documents that the model takes with a question. Raises ContextError if it takes
    none."""
    if not isinstance(session, Session):
        raise SettingError("parts are read by a model here only: send what fits the server's")
    talk, model = session.talk, session.talk.model
    return relevant_parts(
        documents,
        question,
        talk.settings,
        tokenizer=model.tokenizer,
        max_context=model.shape.max_context,
        seen=talk.cache.seen,
    )


def is_too_long(work: Work | None) -> bool:
    """Whether work was refused since its files, or all of it, are too long, and still is."""
    if work is None or not work.shown.ended or not work.shown.error:
        return False
    return isinstance(work.failure, ContextError)


@dataclass(frozen=True)
class Longer:
    """A model of this machine that takes all of what was too long.

    Attributes:
        tokens: about how many that has.
        nbytes: that reading them takes at the peak, by its plan.
    """

    name: str
    tokens: int
    nbytes: int


def longer_model(service: "Service", work: Work, models: Models, first: str) -> Longer | None:
    """The largest model that takes what `work` was refused for, and fits this machine; one that may
    be chosen where the app began with `first`."""
    failure, host = work.failure, service.model_host
    tokens = failure.tokens if isinstance(failure, ContextError) else None
    if tokens is None:
        return None
    needed = tokens + host.settings.planned_tokens + _AROUND
    able = [
        each
        for each in models_here()
        if not each.flaw and (each.max_context or 0) > needed and models.may_use(each.name, first)
    ]
    for each in sorted(able, key=lambda one: -one.nbytes)[:_PLANNED]:
        with suppress(KvliteError):
            given = host.settings.replace({"model": each.name})
            plan = plan_here(given, needed, host.held_bytes())
            if plan.fits and plan.tokens >= needed:
                return Longer(each.name, tokens, plan.peak_bytes)
    return None


def compacts(service: "Service", owner: str, id: str, text: str) -> bool:
    """Whether a message fits once its conversation forgets its beginning."""
    runner, settings = service.model_host.runner, service.settings_of(owner, id)
    if runner is None or settings.beyond_context == "compact" or not service.record(owner, id).said:
        return False
    new = len(text_tokens(runner.tokenizer, text, first=False)) + _AROUND
    return can_compact(new, settings.planned_tokens, runner.shape.max_context)


def price_of_parts(service: "Service", owner: str, id: str) -> Work:
    """What reading the parts takes at most, as the work's result; None while there is no model."""
    store = service.store(owner)

    def task(work: Work) -> Price | None:
        host = service.model_host
        if host.runner is None:
            return None
        now = host.holds(store, id)
        talk = host.runner.conversation(**service.record(owner, id).changed)
        seen = 0 if now is None else now.talk.cache.seen
        tokens = host.runner.shape.max_context - seen - talk.settings.planned_tokens
        text = "A word or two. " * _TRIED
        ids = text_tokens(host.runner.tokenizer, text, first=False)[: min(_TRIED, tokens // 2)]
        return Price(tokens, tokens * seconds_per_token(talk, ids, work.cancel))

    return service.engine.submit(task, "Trying how fast the model reads")
