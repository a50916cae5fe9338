"""An engine in a process of its own, as jobs have one on every card or node."""

import platform
from collections.abc import Iterable, Iterator, Sequence

from kvlite.config.settings import Settings
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.errors import ModelError, reason
from kvlite.jobs.answer import BatchAnswer, failed
from kvlite.jobs.run import answered_as_they_come, open_for
from kvlite.jobs.tasks import Task
from kvlite.model.files import fingerprint


class Engine:
    """A loaded model that answers all questions about a document, and then about the next one.

    Args:
        weights: fingerprint that the model here must have.
        longest: tasks to plan for.
    """

    def __init__(self, settings: Settings, weights: str, longest: Sequence[Task]) -> None:
        self.runner = open_for(settings, longest)
        if fingerprint(self.runner.model_path) != weights:
            raise ModelError(
                f"the model in {self.runner.model_path} on {platform.node()} is another one "
                "than where the job was begun: copy that"
            )

    @property
    def changes(self) -> Sequence[str]:
        """What its plan changed, in sentences."""
        return self.runner.plan.changes if self.runner.plan else ()

    def answered(
        self, shares: Iterable[Sequence[Task]], callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[BatchAnswer]:
        """Answer tasks about one document at a time. Nothing is raised, which would end the whole
        job: tasks that were left have an error."""
        left = dict[str, Task]()

        def taken() -> Iterator[Sequence[Task]]:
            for share in shares:
                left.update((task.id, task) for task in share)
                yield share

        try:
            for answer in answered_as_they_come(self.runner, taken(), callbacks):
                del left[answer.id]
                yield answer
        except Exception as error:
            yield from (failed(task, ModelError(reason(error))) for task in left.values())
