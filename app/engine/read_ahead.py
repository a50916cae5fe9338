"""Documents in the box, which are read while their question is typed."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlite.errors import KvliteError, Stopped
from kvlite.web.work import Work, WorkRequest

if TYPE_CHECKING:
    from .service import Opened, Service


def keep_up(service: "Service", owner: str, id: str, files: Sequence[str]) -> Work | None:
    """Read the files that are in the box, and forget those that were taken out of it. If one could
    not be read, none of those that came with it was, and its error stays in sight. Returns what
    does so; None if there is nothing to do, or an answer is on its way. Raises KvliteError as
    `Service.say`."""
    ahead, busy = service.ahead.get((owner, id)), service.under_way(owner, id)
    if busy is not None and busy is not ahead:
        return None
    failure = None if ahead is None else refusal(ahead)
    if failure is not None:
        ahead = None
        del service.ahead[owner, id]
    before = () if ahead is None else ahead.request.ahead or ()
    if ahead is not None and not {*before} <= {*files}:
        return _take_back(service, owner, id, ahead, files)
    if not service.reads_ahead or {*files} <= {*before}:
        return None
    work = service.say(owner, id, "", files, ahead=True)
    if failure is not None:
        work.note(str(failure))
    return work


def _take_back(service: "Service", owner: str, id: str, ahead: Work, files: Sequence[str]) -> Work:
    """End what is read ahead, and forget all of it that is not among these files."""
    before = ahead.request.ahead or ()
    going = [Path(each).name for each in before if each not in files]
    left = tuple(each for each in before if each in files)
    ahead.cancel.set()

    def ended(work: Work) -> None:
        ahead.ended.wait()

    def task(now: "Opened", work: Work) -> None:
        now.session.take_back(going, work.callbacks)

    request = WorkRequest(ahead=left)
    work = service.work_on(owner, id, "Going back", task, request, ended, ahead)
    service.ahead[owner, id] = work
    return work


def known(ahead: Work | None, files: Sequence[str]) -> tuple[str, ...]:
    """Those of a message's files that were, or are, read ahead; raises why one cannot be."""
    if ahead is None or isinstance(ahead.failure, Stopped):
        return ()
    found = tuple(each for each in ahead.request.ahead or () if each in files)
    if found and (failure := refusal(ahead)) is not None:
        raise failure
    return found


def refusal(work: Work | None) -> KvliteError | None:
    """Why documents could not be read ahead, if they could not."""
    if work is None or work.request.ahead is None or isinstance(work.failure, Stopped):
        return None
    return work.failure if isinstance(work.failure, KvliteError) else None


def forget_refused(aheads: dict[tuple[str, str], Work], key: tuple[str, str]) -> None:
    """Forget that documents could not be read ahead: they may be now, or some of them."""
    if refusal(aheads.get(key)) is not None:
        del aheads[key]


def wait_for(ahead: Work, work: Work) -> float:
    """Wait until documents are read, and show how far they are as what is done first. Returns the
    seconds that took. Raises Stopped if `work` was cancelled, which ends their reading, and
    KvliteError if they cannot be read."""
    begun = time.monotonic()
    for shown in ahead.follow():
        if work.cancel.is_set():
            ahead.cancel.set()
        if not shown.ended:
            counted = {"done": shown.done, "first": shown.first, "total": shown.total}
            work.show(title=shown.title, since=shown.since, **counted)
    if ahead.failure is not None:
        raise ahead.failure
    return time.monotonic() - begun
