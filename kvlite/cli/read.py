"""`kvlite read`: read documents once, to open them in seconds from then on."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvlite.cli import INTERRUPTED
from kvlite.cli.console import print_json
from kvlite.cli.opening import documents_of, load_for, require_files, require_out
from kvlite.cli.options import AsJson, Quiet, with_settings
from kvlite.cli.screen import console, reading, reading_bar
from kvlite.config.paths import SUFFIX, require_writable
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.errors import SettingError, SnapshotError, Stopped
from kvlite.model.chat_template import all_of

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation


@with_settings
def read(
    settings: Settings,
    files: Annotated[
        list[str], typer.Argument(help="documents: text, pdf, Office, html, epub, mail")
    ],
    name: Annotated[
        str, typer.Option(help="its name in the library; left out, the document's")
    ] = "",
    out: Annotated[str, typer.Option(help="write it to this .kv file, not to the library")] = "",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Read documents once and keep what was read: questions about them begin in seconds.

    `kvlite ask` with the same files and the same model opens it by itself. Everything that was
    read is kept, so any method and budget can be used then. It is as large as the host store of
    --recall: --recall-bits 8 or 4 takes a half or a quarter.

    Examples:

      kvlite read report.pdf

      kvlite read a.docx b.md --name contracts --recall-bits 8

      kvlite read report.pdf --out report.kv

      kvlite ask report.kv "What does it conclude?"
    """
    from kvlite.conversation import entries
    from kvlite.conversation.convert import open_library

    library, target = open_library(), _target(out, name)
    if any(file.lower().endswith(SUFFIX) for file in files):
        raise SettingError(
            "what is in a .kv file was read already: ask about it with `kvlite ask FILE.kv`"
        )
    require_files(files, settings)
    if target is not None:
        _require_replaceable(target, out, [Path(file).name for file in files])
    elif name:
        entries.document_named(library, name)
    require_writable(library.folder if target is None else target.resolve().parent)
    entries.limit(library)
    screen = console(quiet)
    documents = documents_of(files, settings, screen)
    said = all_of(documents)
    talk = load_for(settings, said, documents, screen).conversation()
    talk.documents = tuple(documents)
    begun = perf_counter()
    _read(talk, said, screen)
    read_s = perf_counter() - begun
    with reading_bar(screen, "Saving") as bar:
        begun = perf_counter()
        if target is None:
            added = entries.add_document(library, talk, name, bar.update)
        else:
            added = entries.Added(out, target, talk.save(target, progress=bar.update), [])
    save_s, tokens = perf_counter() - begun, len(talk.token_ids)
    if as_json:
        print_json(
            {
                "name": added.name,
                "path": str(added.path),
                "documents": [each.name for each in documents],
                "tokens": tokens,
                "bytes": added.nbytes,
                "read_s": read_s,
                "save_s": save_s,
                "removed": added.removed,
                "notes": [each.note for each in documents if each.note],
            }
        )
        return
    screen.print(
        f"Read {tokens:,} tokens in {read_s:.1f} s; kept {readable(added.nbytes)} as "
        f"{added.name}, in {save_s:.1f} s.",
    )
    for document in documents:
        if document.note:
            screen.print(f"Note: {document.note}.")
    for gone in added.removed:
        screen.print(f"Removed {gone} from the library, to keep to its limit.")


def _read(talk: "Conversation", said: str, screen: Console) -> None:
    try:
        with reading(screen) as (_, callbacks):
            whole = talk.read_ahead(said, callbacks=callbacks)
    except Stopped:
        screen.print("Stopped while reading; nothing was kept.")
        raise typer.Exit(INTERRUPTED) from None
    if not whole:
        raise SettingError(
            f"with --method {talk.settings.method} and --recall {talk.settings.recall} something "
            "would be dropped before a question is there: leave them out, or give --recall auto"
        )


def _require_replaceable(path: Path, called: str, names: Sequence[str] = ()) -> None:
    """Refuse, before anything is read, to overwrite a conversation, a file that is not kvlite's, or
    one of other documents than `names`, where these are given."""
    from kvlite.conversation.file_info import about

    if not path.is_file() or not path.stat().st_size:
        return
    what = ""
    try:
        there = about(path)
        if there.messages:
            what = "is a conversation"
        elif names and there.documents != tuple(names):
            what = f"holds {', '.join(there.documents)}"
    except SnapshotError:
        what = "cannot be opened"
    if what:
        raise SettingError(
            f"{called} is there already, and {what}: give another name, or remove it first"
        )


def _target(out: str, name: str) -> Path | None:
    if not out:
        return None
    if name:
        raise SettingError("give --name or --out, not both")
    path = Path(out)
    if path.suffix != SUFFIX:
        raise SettingError(f"--out {out} does not end in .kv: name it {path.stem or 'it'}.kv")
    require_out(out)
    return path
