"""Rows of a GPU's day as tables in a page."""

from typing import Any

BEGIN, END = "<!-- gpu -->", "<!-- /gpu -->"


def written_into(page: str, parts: list[dict[str, Any]]) -> str:
    """The page with its tables between the two marks made anew.

    Raises:
        ValueError: the page has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} and {END} to write between")
    return "".join([before, BEGIN, "\n", report(parts), END, after])


def report(parts: list[dict[str, Any]]) -> str:
    """A machine's line, and a table for each part."""
    lines = list[str]()
    machine = None
    for part in parts:
        if part["machine"] != machine:
            machine = part["machine"]
            lines += ["", "; ".join(f"{name} {value}" for name, value in machine.items()) + "."]
        unfinished = "" if part["finished"] else " (not finished)"
        lines += ["", f"### {part['question'].splitlines()[0]}", ""]
        lines += [
            f"`{part['part']}`, {part['seconds']:.0f} s{unfinished}",
            "",
            *table(part["rows"]),
        ]
    return "\n".join([*lines, "", ""])


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows as Markdown, a column for every name that one has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        return ["No row was measured."]
    cells = [[shown(row.get(name)) for name in columns] for row in rows]
    head = [columns, ["---"] * len(columns)]
    return [f"| {' | '.join(line)} |" for line in [*head, *cells]]


def shown(value: Any) -> str:
    """A value as a table has it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
