"""A job that is killed again and again, by kill -9: `python -m tests.cli.killing MODEL FOLDER`.

The model is loaded once; each time a fork of that process works on the job. What the engine answers
is noted apart from the file of answers, before that has it.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import kvlite
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.jobs.output import job_of, reserved, writing
from kvlite.jobs.run import answered
from kvlite.jobs.tasks import Task, tasks_in

KILLS = 10


def work(runner: kvlite.Runner, tasks: list[Task], out: Path, noted: Path) -> None:
    with reserved(out), writing(out, job_of(runner.settings), tasks, retry=False) as writer:
        left = {task.id: task for task in tasks if task.id not in writer.written.done}
        for answer in answered(runner, [*left.values()], NO_CALLBACKS):
            with noted.open("a") as file:
                file.write(f"{answer.id}\n")
            writer.add(answer.to_json(), left[answer.id])


def ids_in(out: Path) -> list[str]:
    """Of all whole rows."""
    whole = out.read_bytes().rpartition(b"\n")[0].splitlines() if out.exists() else []
    return [json.loads(line)["id"] for line in whole]


def rows_in(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def main(model: str, folder: Path) -> None:
    tasks = tasks_in(str(folder / "reports"), ["Who?", "Where?", "When?"])
    runner = kvlite.load(model, max_new_tokens=2, budget="64")
    out, moments, kills = folder / "out.jsonl", random.Random(3), 0
    while True:
        done, noted = ids_in(out), folder / f"engine{kills}.txt"
        noted.touch()
        child = os.fork()
        if not child:
            work(runner, tasks, out, noted)
            os._exit(0)
        if kills < KILLS:
            more = len(done) + moments.randrange(5)
            while rows_in(out) < min(more, len(tasks)) and not ended(child):
                time.sleep(0.005)
            time.sleep(moments.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
        killed = os.waitpid(child, 0)[1]
        assert killed in (0, signal.SIGKILL)
        assert ids_in(out)[: len(done)] == done  # none is lost
        assert not {*noted.read_text().split()} & {*done}  # none is answered again
        kills += bool(killed)
        if not killed:
            rows = ids_in(out)
            assert len(rows) == len({*rows}) == len(tasks)
            if kills == KILLS:
                break
            out.unlink()  # it was too fast: once more
            noted.unlink()
    print(json.dumps({"kills": kills, "rows": len(rows)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
