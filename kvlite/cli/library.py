"""`kvlite library`: documents and conversations that are kept."""

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from kvlite.cli.console import output, print_json
from kvlite.cli.options import AsJson
from kvlite.cli.screen import console
from kvlite.config.settings import Settings
from kvlite.config.units import readable

if TYPE_CHECKING:
    from kvlite.conversation.entries import Entry

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    epilog="Try: kvlite read report.pdf, then kvlite library",
)


@app.callback(invoke_without_command=True)
def listing(context: typer.Context, as_json: AsJson = False) -> None:
    """Documents and conversations that are kept, to be opened in seconds: list, remove, limit.

    Examples:

      kvlite library

      kvlite library remove report.pdf

      kvlite library limit 50GiB
    """
    if context.invoked_subcommand is None:
        list_entries(as_json)


@app.command("list")
def list_entries(as_json: AsJson = False) -> None:
    """List the entries, the last used first: size, tokens, model, method, last use. An entry that
    is "light" has no cache, and is read again when it is opened; of entries with one name, the
    beginning of the id says which (`kvlite library remove ID`)."""
    from kvlite.conversation.convert import open_library
    from kvlite.conversation.entries import entries, limit

    library = open_library()
    found, most = entries(library), limit(library)
    total = sum(each.nbytes for each in found)
    if as_json:
        rows = [_plain(each) for each in found]
        folder = str(library.folder)
        print_json({"folder": folder, "bytes": total, "limit": most, "entries": rows})
        return
    out = output()
    if not found:
        out.print("The library is empty: `kvlite read FILE` puts a document there.")
        return
    out.print(_table(found))
    for each in found:
        if each.flaw:
            out.print(f"{each.flaw}.", soft_wrap=True, markup=False)
    of = "" if most is None else f" of {readable(most)}"
    out.print(f"{readable(total)}{of} in {library.folder}", soft_wrap=True)


@app.command()
def remove(
    names: Annotated[list[str], typer.Argument(help="as `kvlite library` lists them")],
    as_json: AsJson = False,
) -> None:
    """Remove entries; none of them if one does not exist."""
    from kvlite.conversation.convert import open_library
    from kvlite.conversation.entries import entry_named
    from kvlite.conversation.entries import remove as remove_entry

    library = open_library()
    for name in names:
        entry_named(library, name)
    freed = sum(remove_entry(library, name) for name in dict.fromkeys(names))
    if as_json:
        print_json({"removed": names, "bytes": freed})
        return
    console().print(f"Removed {', '.join(names)}: {readable(freed)} freed.")


@app.command()
def limit(
    size: Annotated[
        str, typer.Argument(help="all entries together may take that much, e.g. 50GiB, or none")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Limit how much all entries may take, or show the limit. The documents that were not used
    for longest are removed first; conversations stay until you remove them."""
    from kvlite.conversation import entries
    from kvlite.conversation.convert import open_library

    library = open_library()
    removed = entries.set_limit(library, size) if size else []
    most = entries.limit(library)
    if as_json:
        print_json({"limit": most, "removed": removed})
        return
    screen = console()
    screen.print("There is no limit." if most is None else f"The limit is {readable(most)}.")
    for name in removed:
        screen.print(f"Removed {name}, to keep to it.")
    total = sum(each.nbytes for each in entries.entries(library))
    if most is not None and total > most:
        screen.print(
            f"Conversations take {readable(total)}, and stay: `kvlite library remove NAME`.",
        )


def _plain(entry: "Entry") -> dict[str, object]:
    plain: dict[str, object] = {
        "id": entry.id,
        "name": entry.name,
        "kind": entry.kind,
        "path": str(entry.path if entry.about is None else entry.about.path),
        "bytes": entry.nbytes,
        "used": _stamp(entry.used),
        "flaw": entry.flaw,
    }
    if (about := entry.about) is not None:
        plain |= {
            "created": _stamp(about.created),
            "tokens": about.tokens,
            "messages": about.messages,
            "documents": list(about.documents),
            "model": about.model,
            "method": about.settings.get("method"),
            "kvlite": about.kvlite,
            "light": about.light,
        }
    return plain


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _table(found: "list[Entry]") -> Table:
    from kvlite.conversation.entries import ID_DIGITS, ago

    columns = "kind", "size", "tokens", "model", "method", "last used"
    table, names = (
        Table(Column("name", overflow="fold"), *columns),
        Counter(each.name for each in found),
    )
    for each in found:
        about, size, when = each.about, readable(each.nbytes), ago(each.used)
        id = f" ({each.id[:ID_DIGITS]})" if names[each.name] > 1 else ""
        row = each.name + id, each.kind
        if about is None:
            what = "damaged" if each.flaw else "a server's"
            table.add_row(*row, size, what, "", "", when)
            continue
        method = str(about.settings.get("method"))
        shown = "the default" if method == Settings.method else method
        model = about.model.replace("\\", "/").rstrip("/").rpartition("/")[2]
        tokens = f"{about.tokens:,}"
        size += " (light)" if about.light else ""
        table.add_row(*row, size, tokens, model, shown, when)
    return table
