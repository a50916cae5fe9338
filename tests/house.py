"""Lines of Python a package, and what tests know of its inside, held to the tables in
pyproject.toml: `python -m tests.house`.

A change that needs more raises its row in the same commit, and says why.
"""

import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Packages that share a row.
WITH = {"web": "server"}
ALONE = "modules"
# What tests may import: all else freezes the structure.
OUTSIDE = re.compile(
    r"kvlite|kvlite\.(methods|cache|ops|errors|engine\.(prefill|step)|cli\.main|server)|kvlite_app"
)
_IMPORT = re.compile(r"^(?:from|import) (kvlite[\w.]*)", re.MULTILINE)


def lines() -> Counter[str]:
    """Lines by row of the table."""
    found: Counter[str] = Counter()
    for file in [*ROOT.glob("kvlite/**/*.py"), *ROOT.glob("app/**/*.py")]:
        top, *inner = file.relative_to(ROOT).parts
        name = top if top == "app" else inner[0] if len(inner) > 1 else ALONE
        found[WITH.get(name, name)] += _lines_of(file)
    return found


def of_tests() -> dict[str, int]:
    """Lines of tests, and how many inner modules they import."""
    files = [each for each in ROOT.glob("tests/**/*.py") if ".cache" not in each.parts]
    imported = {name for file in files for name in _IMPORT.findall(file.read_text("utf-8"))}
    inner = [name for name in imported if not OUTSIDE.fullmatch(name)]
    return {"lines": sum(map(_lines_of, files)), "inner modules": len(inner)}


def _lines_of(file: Path) -> int:
    with file.open("rb") as text:
        return sum(1 for _ in text)


def exceeded(table: dict[str, Any], found: dict[str, int], called: str) -> int:
    """Say which rows of a table are exceeded, or missing; how many those are."""
    wrong = 0
    for name in sorted({*table} | {*found}):
        most, have = table.get(name, 0), found.get(name, 0)
        if have > most:
            wrong += 1
            print(f"{name}: {have:,}, and [tool.kvlite.{called}] allows {most:,}")
    return wrong


def main() -> int:
    """Say which rows are exceeded, and which are no packages."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["kvlite"]
    found, tests = lines(), of_tests()
    wrong = exceeded(tables["lines"], found, "lines") + exceeded(tables["tests"], tests, "tests")
    print(
        f"{sum(found.values()):,} lines in {len(found)} packages, "
        f"{sum(tables['lines'].values()):,} allowed; tests have {tests['lines']:,} and import "
        f"{tests['inner modules']} inner modules"
    )
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
