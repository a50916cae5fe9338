"""The `kvlite` program, and `python -m kvlite`."""

import sys

from kvlite.cli import INTERRUPTED


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it as quietly as later."""
    try:
        from kvlite.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
