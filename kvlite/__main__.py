"""The `kvlite` program, and `python -m kvlite`."""

import atexit
import os
import sys

from kvlite.cli import INTERRUPTED


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it as quietly as later."""
    code: object = 0
    try:
        from kvlite.cli.main import main as run

        run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as ended:
        code = ended.code
    _leave(code)


def _leave(code: object) -> None:
    """End the process at once: to take torch's and transformers' modules apart, as Python does in
    the end, takes a second for which whoever pressed Ctrl-C would wait."""
    if code is not None and not isinstance(code, int):
        sys.exit(str(code))
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:  # whoever read it has gone; Python says so in its own way
        sys.exit(code)
    atexit._run_exitfuncs()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
