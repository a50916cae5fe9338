"""How long `/health` takes, asked every 50 ms by a process of its own.

`python -m tests.attack.health PORT` writes a line a look: when it began, how long it took, and how
late this process woke up for it. So late the machine itself is, whatever the server does.
"""

import http.client
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PAUSE, MOST = 0.05, 0.1


@dataclass(frozen=True)
class Look:
    """One of them, in seconds; `status` 0 if none came."""

    began: float
    took: float
    late: float
    status: int


@dataclass
class Health:
    """All looks of a while."""

    looks: list[Look] = field(default_factory=list)

    @property
    def longest(self) -> float:
        """Seconds."""
        return max((each.took for each in self.looks), default=0.0)

    @property
    def latest(self) -> float:
        """Seconds that the machine let a process wait that had slept."""
        return max((each.late for each in self.looks), default=0.0)

    def of_thousand(self, thousandths: int) -> float:
        """A percentile of the seconds, by its thousandths."""
        took = sorted(each.took for each in self.looks)
        return took[min(len(took) - 1, len(took) * thousandths // 1000)] if took else 0.0

    def slow(self) -> list[Look]:
        """Those that took longer than they may, and than the machine explains."""
        return [each for each in self.looks if each.took > MOST + self.latest]

    def failed(self) -> list[Look]:
        """Those without an answer, or another than 200."""
        return [each for each in self.looks if each.status != 200]

    def __str__(self) -> str:
        over = sum(each.took > MOST for each in self.looks)
        return (
            f"/health {len(self.looks):,} times: longest {1000 * self.longest:.0f} ms, 99.9th "
            f"percentile {1000 * self.of_thousand(999):.0f} ms, 99th "
            f"{1000 * self.of_thousand(990):.0f} ms, {over} over {1000 * MOST:.0f} ms; the machine "
            f"woke this process up to {1000 * self.latest:.0f} ms late"
        )


@contextmanager
def watched(port: int, folder: Path) -> Iterator[Health]:
    """What `/health` does meanwhile, known at the end."""
    found, written = Health(), folder / f"health-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "tests.attack.health", str(port)]
    with written.open("wb") as out, subprocess.Popen(command, stdout=out) as process:
        try:
            yield found
        finally:
            process.terminate()
            process.wait(10)
    for line in written.read_text().splitlines():
        parts = line.split()
        if len(parts) == 4:
            found.looks.append(Look(*map(float, parts[:3]), int(parts[3])))


def _look_on(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        slept = time.monotonic()
        time.sleep(PAUSE)
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        took = time.monotonic() - began
        print(f"{began} {took} {began - slept - PAUSE} {status}", flush=True)


if __name__ == "__main__":
    _look_on(int(sys.argv[1]))
