"""`python -m kvlite` is the `kvlite` program."""

from kvlite.cli.main import main

if __name__ == "__main__":
    main()
