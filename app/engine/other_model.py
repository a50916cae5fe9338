"""Conversations that another model has read than the one in use."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvlite.conversation import retold
from kvlite.conversation.file_info import About, about
from kvlite.errors import SnapshotError
from kvlite.web.work import Work

if TYPE_CHECKING:
    from .service import Service


def former_reader(service: "Service", owner: str, id: str) -> About | None:
    """What is on disk of a conversation that another model has read; None where the one in use
    has, or nothing is known of either."""
    host, store = service.model_host, service.store(owner)
    if host.runner is None or host.holds(store, id) is not None or not store.has(id):
        return None
    try:
        found = about(store.light(id))
    except SnapshotError:  # it is said once it is opened
        return None
    return None if found.identity == host.runner.identity else found


def read_again(service: "Service", owner: str, id: str) -> Work:
    """Have the model in use read a conversation, for messages to come."""
    return service.work_on(owner, id, "Reading it again", lambda now, work: None)


def price_of(service: "Service", owner: str, id: str) -> Work:
    """What that takes, as the work's result; None once it is read. Its failure says why it cannot
    be."""
    store = service.store(owner)

    def task(work: Work) -> retold.Price | None:
        runner = service.model_host.runner
        if runner is None or former_reader(service, owner, id) is None:
            return None
        changed = service.record(owner, id).changed
        return retold.price_of(runner, store.light(id), work.cancel, **changed)

    return service.engine.submit(task, "Trying how fast the model reads")


def return_to(service: "Service", former: About) -> Work:
    """Load the model that has read it."""
    settings = service.model_host.settings
    values = {"model": former.model}
    if Path(settings.model).name == Path(former.model).name:
        values["weights"] = str(former.settings.get("weights", "auto"))
    return service.load(settings.replace(values))
