"""The `kvlite` program, and `python -m kvlite`."""

import atexit
import os
import sys

from kvlite.cli import INTERRUPTED
from kvlite.config.threads import set_threads


def main() -> None:
    """Run the command line; Ctrl-C is quiet even while modules are being imported."""
    code: object = 0
    set_threads()
    try:
        from kvlite.cli.main import main as run

        run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as ended:
        code = ended.code
    _leave(code)


def _leave(code: object) -> None:
    """End the process at once: Python takes a second to tear down torch and transformers, and
    whoever pressed Ctrl-C would wait for it."""
    if code is not None and not isinstance(code, int):
        sys.exit(str(code))
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:  # the reader has gone; Python reports that itself
        sys.exit(code)
    atexit._run_exitfuncs()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
