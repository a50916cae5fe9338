"""Lines of Python a package, held to the table in pyproject.toml: `python -m tests.house`.

A change that needs more raises its row in the same commit, and says why.
"""

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Packages that share a row.
WITH = {"web": "server"}
ALONE = "modules"


def lines() -> Counter[str]:
    """Lines by row of the table."""
    found: Counter[str] = Counter()
    for file in [*ROOT.glob("kvlite/**/*.py"), *ROOT.glob("app/**/*.py")]:
        top, *inner = file.relative_to(ROOT).parts
        name = top if top == "app" else inner[0] if len(inner) > 1 else ALONE
        with file.open("rb") as text:
            found[WITH.get(name, name)] += sum(1 for _ in text)
    return found


def main() -> int:
    """Say which rows are exceeded, and which are no packages."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["kvlite"]["lines"]
    found, wrong = lines(), 0
    for name in sorted({*table} | {*found}):
        most, have = table.get(name, 0), found[name]
        if have > most:
            wrong += 1
            print(f"{name}: {have:,} lines, and [tool.kvlite.lines] allows {most:,}")
    print(
        f"{sum(found.values()):,} lines in {len(found)} packages, {sum(table.values()):,} allowed"
    )
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
