"""An engine without a model, which notes what it reads."""

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError
from kvlite.jobs.answer import BatchAnswer
from kvlite.jobs.tasks import Task


class StandIn:
    """Reads two documents at a time, if there are two; a line of `log` has their names.

    A document called `crash` ends the process, after it answered `who`.
    """

    changes = ("it is a stand-in",)

    def __init__(self, log: str, kind: str) -> None:
        self.log = Path(log)
        if kind == "refuses":
            raise SettingError("there is no room")
        if kind == "ends":
            os._exit(3)

    def answered(
        self, shares: Iterable[Sequence[Task]], callbacks: Callbacks
    ) -> Iterator[BatchAnswer]:
        each = iter(shares)
        while read := [share for share in (next(each, None), next(each, None)) if share]:
            names = [share[0].document for share in read]
            with self.log.open("a") as file:
                file.write(" ".join(names) + "\n")
            callbacks.say("reading")
            if "endless" in names[0]:
                time.sleep(600)
            for share in sorted(read, key=lambda share: share[0].document != "crash"):
                for task in share:
                    if task.document == "crash" and task.question != "who":
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield BatchAnswer(task.id, task.document, task.question, str(os.getpid()))
