"""Settings tuned on a document of a conversation."""

from contextlib import suppress
from time import monotonic
from typing import Any

from kvlite.bench.advice import TuneRow
from kvlite.bench.folder import opened
from kvlite.bench.task import measure
from kvlite.bench.tune import Tune
from kvlite.conversation.runner import Runner
from kvlite.documents import Document
from kvlite.errors import SettingError, Stopped
from kvlite.model.source import find_model
from kvlite.web.work import Work

from .service import Opened, Service

# What is proposed is kept beside the accounts of answers.
TUNED = "tuned"


def tune(service: Service, owner: str, id: str, name: str, minutes: float) -> Work:
    """Measure settings on a document of a conversation for some minutes, and keep what they are
    worth and which to take. If it is stopped, that comes from what was measured; begun again, it
    goes on."""

    def task(_: Opened, work: Work) -> None:
        now = service.model_host.active
        assert now is not None
        work.public = "settings are being tuned on a document"
        found = (each for each in now.talk.documents if each.name == name)
        if (document := next(found, None)) is None:
            raise SettingError(f"{name or 'no document'} is not read here: choose another one")
        work.note(f"Tuning for {name} ends after {minutes:g} minutes; Stop takes what there is.")
        proposed = _proposed(now.session.runner, document, work, 60 * minutes)
        service.store(owner).keep_account(id, TUNED, proposed)
        work.show(notes=(f"Tuned for {name}: Settings has what is proposed.",))

    return service.work_on(owner, id, f"Tuning for {name}", task)


def _proposed(runner: Runner, document: Document, work: Work, seconds: float) -> dict[str, Any]:
    task = Tune(file=document.name, text=document.text, cancel=work.cancel)
    begun, settings = monotonic(), runner.settings
    folder = opened(task, settings, find_model(settings.model))
    task.resume(folder.rows)
    units = task.work(runner)
    folder.begin()
    work.progress(0, int(seconds))
    with suppress(Stopped):
        for row in measure(units, folder.done, begun + seconds):
            folder.add(row.to_json())
            work.progress(min(int(monotonic() - begun), int(seconds)), int(seconds))
    rows = [TuneRow(**each) for each in folder.rows]
    advice = task.advice(rows)
    if advice is None:
        if work.cancel.is_set():
            raise Stopped
        raise SettingError("nothing was measured yet: give it more minutes")
    return {
        "brief": document.name,
        "told": [advice.reason],
        "lines": task.table(rows),
        "values": {**advice.values},
        "model": settings.model,
    }
