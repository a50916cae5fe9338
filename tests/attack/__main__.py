"""A generated attack on a running server, and on the commands that read files.

`python -m tests.attack [SEED] [COUNT]` sends four fifths of them to a server in a process of its
own, and gives a fifth as damaged files to commands; then the disk of a server fails, and one is
killed. The same seed makes the same. `--minutes N` lets six clients send good requests among bad
ones for so long instead.

Nothing may be answered with 5xx but 503 and 507, or in more than ten seconds, or leave a traceback
in the log; what is good is answered as ever; `/health` answers within 100 ms, beside what the
machine itself is late; and memory is back at the end: within 15%, or 100 MiB, of what it was.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.attack.disk import disk, kill
from tests.attack.files import Files
from tests.attack.process import ATTACKED, served
from tests.attack.requests import attack, soak
from tests.cli.conftest import model_of


def main() -> int:
    """Attack, and name what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("count", type=int, nargs="?", default=3000)
    parser.add_argument("--minutes", type=float, default=0)
    given = parser.parse_args()
    wrong, began = list[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "tiny").mkdir()
        model = model_of(folder / "tiny", 8192)
        with served(model, folder / "data", *ATTACKED) as server:
            if given.minutes:
                wrong += soak(server, given.seed, given.minutes, folder)
            else:
                wrong += attack(server, given.seed, given.count * 4 // 5, folder)
        if not given.minutes:
            (folder / "files").mkdir()
            files = Files(model, folder / "files", given.seed)
            files.run(given.count - given.count * 4 // 5)
            wrong += files.found
            wrong += disk(model, folder)
            wrong += kill(model, folder)
    print("\n".join(wrong[:40]) or "nothing is wrong")
    print(f"{time.monotonic() - began:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
