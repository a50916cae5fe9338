"""What commands open: files, models, saved conversations, the library."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvlite.cli.screen import reading_bar, tell_of_compiling
from kvlite.config.paths import SUFFIX
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.documents import Document, read_document, require_readable
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import ContextError, SettingError, SnapshotError
from kvlite.model.answers.thinking import thinking_variables
from kvlite.model.chat_template import all_of, question_about, tokens_of
from kvlite.model.source import folder_here, require_model
from kvlite.model.text_limit import text_limit_of

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation
    from kvlite.conversation.runner import Runner
    from kvlite.conversation.snapshot import Snapshot

# Bytes of a file above which it is worth looking up how much text fits the model.
_LARGE = 1 << 20

FromLibrary = Annotated[
    bool, typer.Option("--library/--no-library", help="open what `kvlite read` has read already")
]


def require_files(files: Sequence[str], settings: Settings) -> None:
    """Check that files can be read and that there can be such a model, before libraries are
    imported that take seconds. Raises DocumentError or SnapshotError if a file is not there, or
    cannot be read; SettingError if a .kv file is named together with others; ModelError if no model
    can have this name."""
    from kvlite.conversation.file_info import about

    saved = _named_file(files)
    if saved is not None:
        about(saved)
        return
    for file in files:
        require_readable(file)
    require_model(settings.model)


def require_out(out: str) -> None:
    """Raises SettingError if --out names a folder, or a file in a folder that is not there."""
    path = Path(out)
    if out and not path.resolve().parent.is_dir():
        raise SettingError(f"--out {out}: there is no folder {path.resolve().parent}")
    if out and path.is_dir():
        raise SettingError(f"--out {out} is a folder: name a file")


def documents_of(
    files: Sequence[str], settings: Settings, screen: Console, *, whole: bool = True
) -> list[Document]:
    """Read files as documents for the settings' model, under a progress bar. Raises ContextError if
    a document cannot fit the model as a `whole`, and DocumentError if a file cannot be read."""
    limit = _text_limit(files, settings.model) if whole else None
    return _read(files, screen, limit, **settings.reading)


def documents_to_send(files: Sequence[str], screen: Console, settings: Settings) -> list[Document]:
    """Read files as documents for a server, whose model is not known here. Raises SettingError if
    one is a saved conversation, and DocumentError if a file cannot be read."""
    if (saved := _named_file(files)) is not None:
        raise SettingError(f"{saved} is opened by kvlite itself: leave --server out")
    for file in files:
        require_readable(file)
    return _read(files, screen, None, **settings.reading)


def _read(
    files: Sequence[str], screen: Console, limit: int | None, **reading: Any
) -> list[Document]:
    found = []
    for file in files:
        with reading_bar(screen, f"Opening {Path(file).name}") as bar:
            found.append(read_document(file, limit=limit, progress=bar.update, **reading))
    return found


def _text_limit(files: Sequence[str], model: str) -> int | None:
    if all(file != "-" and Path(file).stat().st_size < _LARGE for file in files):
        return None
    folder = folder_here(model)
    return None if folder is None else text_limit_of(folder)


def load_for_parts(
    settings: Settings, question: str, documents: list[Document], screen: Console
) -> "Runner":
    """Load the model, planned for a question about documents. Of those that it does not take as a
    whole, `documents` has the relevant parts afterwards."""
    from kvlite.conversation.relevant_parts import relevant_parts
    from kvlite.conversation.runner import open_runner

    said = {"system": settings.system, "variables": thinking_variables(settings.thinking)}

    def reads(**model: Any) -> int:
        try:
            return tokens_of(text=question_about(documents, question), said=said, **model)
        except ContextError:
            documents[:] = relevant_parts(documents, question, settings, **model)
        return tokens_of(text=question_about(documents, question), said=said, **model)

    return load_by(partial(open_runner, settings, reads=reads), screen)


def load_for(
    settings: Settings, text: str, documents: Sequence[Document], screen: Console
) -> "Runner":
    """Load the model, planned so that a text about documents fits ("" if it is not known yet), and
    print what the plan changed."""
    from kvlite.conversation.runner import open_runner

    called = ", ".join(each.name for each in documents)
    said = {"system": settings.system, "variables": thinking_variables(settings.thinking)}
    reads = partial(tokens_of, text=text, called=called, said=said) if text else None
    return load_by(partial(open_runner, settings, reads=reads), screen)


def load_by(opens: "Callable[..., Runner]", screen: Console) -> "Runner":
    """Load the model as `opens` does, given `notify`, and print what the plan changed."""
    tell_of_compiling(screen)
    with screen.status("Loading the model") as status:
        runner = opens(notify=status.update)
    for why in runner.plan.changes if runner.plan else ():
        screen.print(f"Plan: {why}", style="dim")
    return runner


def _named_file(files: Sequence[str]) -> Path | None:
    saved = [file for file in files if file.lower().endswith(SUFFIX)]
    if saved and len(files) > 1:
        raise SettingError(f"{saved[0]} is opened by itself: leave the other files out")
    return Path(saved[0]) if saved else None


def open_files(
    files: Sequence[str],
    settings: Settings,
    question: str,
    screen: Console,
    *,
    library: bool,
    parts: bool = False,
) -> "tuple[Runner, Conversation | None, list[Document]]":
    """Open documents or a .kv file, and the model.

    Args:
        question: the first one, or "": memory is planned for it.
        library: whether documents that were read before are opened from the library.
        parts: whether of documents that are too long the parts are read that a text search finds
            for the question.

    Returns:
        The model; the conversation in the file or the library, if there is one; the documents.
    """
    saved = _named_file(files)
    if saved is not None:
        return *_open_saved(saved, settings, question, screen), []
    documents = documents_of(files, settings, screen, whole=not parts)
    if parts:
        runner = load_for_parts(settings, question, documents, screen)
    else:
        said = question_about(documents, question) if question else all_of(documents)
        runner = load_for(settings, said, documents, screen)
    found = _from_library(runner, documents, screen) if library and documents else None
    return runner, found, documents


def _open_saved(
    path: Path, settings: Settings, question: str, screen: Console
) -> "tuple[Runner, Conversation]":
    """A saved conversation and its model; settings that are not defaults override its own."""
    from kvlite.conversation.runner import open_runner
    from kvlite.conversation.snapshot import Snapshot

    given = {
        each.name: getattr(settings, each.name)
        for each in fields(settings)
        if getattr(settings, each.name) != each.default
    }
    with Snapshot(path) as saved:
        about = saved.about
        own = {"model": about.model, "weights": about.settings.get("weights", "auto")}

        again = about.tokens if about.light else 0  # a light file has no cache

        def reads(tokenizer: Any, max_context: int) -> int:
            return tokens_of(tokenizer, question, max_context) + again

        chosen = settings.replace({**own, **given})
        runner = load_by(partial(open_runner, chosen, reads=reads), screen)
        late = {name: given[name] for name in given if name not in own}
        chosen = saved.settings(runner.settings).replace(late)
        return runner, _opened(runner, saved, chosen, screen)


def _from_library(
    runner: "Runner", documents: Sequence[Document], screen: Console
) -> "Conversation | None":
    from kvlite.conversation import entries
    from kvlite.conversation.convert import open_library
    from kvlite.conversation.snapshot import Snapshot

    def notify(flaw: str) -> None:
        screen.print(f"kvlite: {flaw}")

    entry = entries.matching(open_library(), runner.model, documents, runner.settings, notify)
    if entry is None or entry.about is None:
        return None
    try:
        with Snapshot(entry.about.path) as saved:
            talk = _opened(runner, saved, runner.settings, screen)
    except SnapshotError as error:
        screen.print(f"kvlite: {error}")
        return None
    entries.used(entry)
    screen.print(
        f"Opened {entry.name}, read {entries.ago(entry.about.created)} "
        f"({entry.about.tokens:,} tokens, {readable(entry.nbytes)}); --no-library reads it anew.",
        style="dim",
    )
    return talk


def _opened(
    runner: "Runner", saved: "Snapshot", settings: Settings, screen: Console
) -> "Conversation":
    from kvlite.conversation.conversation import Conversation

    talk = Conversation(runner.model, runner.config.changed(settings))
    if saved.about.light:
        with reading_bar(screen, "Reading") as bar:
            saved.restore(talk, callbacks=Callbacks(bar.update, bar.note))
    else:
        with reading_bar(screen, "Opening") as bar:
            saved.restore(talk, bar.update)
    return talk


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection while libraries are imported: their modules stay anyway, and looking
    through them takes a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
