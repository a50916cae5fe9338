"""A job on a Ray cluster: Ray Data hands documents to engines, one an actor, and rows come back.

Ray computes, the one who asked writes (`jobs.output`): a row that comes twice is dropped here, one
that never comes is answered when the job is begun again.
"""

import logging
import os
import pickle
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

from kvlite.config.settings import Settings
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import ModelError, SettingError, reason
from kvlite.jobs.answer import TRIES, BatchAnswer, lost
from kvlite.jobs.run import Engine, largest
from kvlite.jobs.tasks import Task, shares_of

# How Ray's text of an error goes on that an engine raised when it began.
_FROM_ENGINE = "kvlite.errors."

_LOOK = "Ray's logs on that node may say why"


class Actor(Engine):
    """An engine as `map_batches` calls it."""

    def __call__(self, batch: Mapping[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        """A batch is one document's tasks."""
        for answer in self.answered([pickle.loads(batch["tasks"][0])]):
            yield {"answer": [pickle.dumps(answer)]}


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster. Raises SettingError if Ray is not installed, or there is no such
    cluster.

    Args:
        address: host:port of its head, `auto` for the one that this machine is in, or `local` for
            one that begins here and ends with the job.
    """
    try:
        import ray
    except ImportError as error:
        raise SettingError(
            "--ray needs Ray Data, which is not installed: pip install 'kvlite[cluster]'"
        ) from error
    host, _, port = address.rpartition(":")
    try:
        if host:  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingError(
            f"--ray {address}: there is no cluster ({reason(error)}): begin one with `ray start "
            "--head`, or take --ray local"
        ) from error
    try:
        with redirect_stdout(sys.stderr):  # where Ray prints what happens to nodes
            yield
    finally:
        ray.shutdown()


def answered_on_cluster(
    settings: Settings, weights: str, tasks: Sequence[Task], callbacks: Callbacks
) -> Iterator[BatchAnswer]:
    """As `run.answered`, on all nodes of the connected cluster; documents come as they end. Raises
    ModelError if no engine could begin, or Ray gave up.

    Args:
        weights: as of `Engine`.
        callbacks: `cancel` ends it when the next row comes; other documents being answered are
            lost.
    """
    import ray
    from ray.data import DataContext

    context = DataContext.get_current()
    context.max_errored_blocks = -1  # a document whose actor ends is missing, and tried again
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    # Files are named for processes that begin in another folder.
    if os.path.exists(settings.model):
        settings = settings.replace({"model": os.path.abspath(settings.model)})
    shipped = [replace(t, document=t.document and os.path.abspath(t.document)) for t in tasks]
    begin = settings, weights, largest(shipped)
    left, tries = {task.id: task for task in tasks}, 0
    while left and tries < TRIES:
        before = len(left)
        try:
            for answer in _computed([task for task in shipped if task.id in left], begin):
                task = left.pop(answer.id, None)
                if task is not None:
                    yield replace(answer, document=task.document)
                if callbacks.cancelled:
                    return
            tries += 1
        except ray.exceptions.RayError as error:
            *_, last = str(error).strip().splitlines()
            if _FROM_ENGINE in last:
                raise ModelError(last.partition(_FROM_ENGINE)[2].partition(": ")[2]) from error
            if len(left) == before:
                raise ModelError(f"Ray ended the job ({last}): the same command goes on") from error
    yield from (lost(task, _LOOK) for task in left.values())


def _computed(tasks: Sequence[Task], begin: tuple[Any, ...]) -> Iterator[BatchAnswer]:
    """Each document tried once by one of the engines, which `begin` so; those whose engine ends are
    missing. Raises Ray's errors."""
    from ray.data import ActorPoolStrategy, from_items

    shares = [{"tasks": pickle.dumps(share)} for share in shares_of(tasks)]
    engines, needs = _engines(begin[0])
    read = from_items(shares, override_num_blocks=len(shares))
    with warnings.catch_warnings(action="ignore"):  # max_task_retries has no successor yet
        answers = read.map_batches(
            Actor,
            fn_constructor_args=begin,
            batch_size=1,
            # One task at a time: an actor that ends takes no other document with it.
            compute=ActorPoolStrategy(
                size=min(engines, len(shares)), max_tasks_in_flight_per_actor=1
            ),
            max_task_retries=0,
            **needs,
        )
    for row in answers.iter_rows():
        yield pickle.loads(row["answer"])


def _engines(settings: Settings) -> tuple[int, dict[str, float]]:
    """How many engines the cluster has room for, and what each needs: a GPU, or where there is
    none, all processors of its smallest node."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cards = sum(int(node.get("GPU", 0)) for node in nodes)
    if cards and not settings.device.startswith("cpu"):
        return cards, {"num_gpus": 1}
    cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise SettingError("the cluster has neither GPUs nor processors: add a node that has some")
    return sum(each // min(cores) for each in cores), {"num_cpus": min(cores)}
