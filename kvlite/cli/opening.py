"""What was read before, opened for questions: from the library, or from a file that is named."""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli.screen import reading_bar
from kvlite.config.paths import SUFFIX
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError, SnapshotError

if TYPE_CHECKING:
    from rich.console import Console

    from kvlite.conversation.conversation import Conversation
    from kvlite.conversation.runner import Runner
    from kvlite.conversation.snapshot import Snapshot
    from kvlite.documents import Document

# Bytes of a file of which it is worth looking up whether they could fit the model.
_LARGE = 1 << 20

FromLibrary = Annotated[
    bool, typer.Option("--library/--no-library", help="open what `kvlite read` has read already")
]
"""A command's flag."""


def require_files(files: Sequence[str], settings: Settings) -> None:
    """Check files that are named, and what the model is called, before anything is read and before
    libraries are imported that take seconds.

    Raises:
        DocumentError, SnapshotError: one is not there, or cannot be read.
        SettingError: the file of a conversation is named together with others.
        ModelError: no model can be called so.
    """
    from kvlite.conversation.file_info import about
    from kvlite.documents import require_readable
    from kvlite.model.source import require_model

    saved = named_file(files)
    if saved is not None:
        about(saved)
        return
    for file in files:
        require_readable(file)
    require_model(settings.model)


def documents_of(files: Sequence[str], model: str, screen: "Console") -> "list[Document]":
    """The documents of files, with a bar for those that have many pages.

    Args:
        model: what will read them.

    Raises:
        ContextError: one of them cannot fit the model.
        DocumentError: one of them cannot be read.
    """
    from kvlite.documents import read_document

    found, limit = [], _limit(files, model)
    for file in files:
        with reading_bar(screen, f"Opening {Path(file).name}") as bar:
            found.append(read_document(file, limit=limit, progress=bar.update))
    return found


def load_for(settings: Settings, text: str, screen: "Console") -> "Runner":
    """The model, planned so that a text fits, with what the plan changed said on the screen.

    Args:
        text: what will be read first; "" if that is not known.
    """
    from kvlite.conversation.runner import open_runner
    from kvlite.model.chat_template import tokens_of

    with screen.status("Loading the model") as status:
        reads = partial(tokens_of, text=text) if text else None
        runner = open_runner(settings, status.update, reads)
    _say_plan(runner, screen)
    return runner


def _say_plan(runner: "Runner", screen: "Console") -> None:
    """What is not as it would be with memory enough, and why."""
    for why in runner.plan.changes if runner.plan else ():
        screen.print(f"Plan: {why}", style="dim")


def _limit(files: Sequence[str], model: str) -> int | None:
    """The most characters that could fit a model; None where no file is large or the model is not
    on this machine yet."""
    if all(file != "-" and Path(file).stat().st_size < _LARGE for file in files):
        return None
    from kvlite.model.source import folder_here
    from kvlite.model.text_limit import text_limit_of

    folder = folder_here(model)
    return None if folder is None else text_limit_of(folder)


def named_file(files: Sequence[str]) -> Path | None:
    """The file of a conversation, if that is what is asked about.

    Raises:
        SettingError: it is named together with others.
    """
    saved = [file for file in files if file.lower().endswith(SUFFIX)]
    if saved and len(files) > 1:
        raise SettingError(f"{saved[0]} is opened by itself: leave the other files out")
    return Path(saved[0]) if saved else None


def open_file(
    path: Path, settings: Settings, asked: str, screen: "Console"
) -> "tuple[Runner, Conversation]":
    """The conversation in a file, and the model it was made with.

    Args:
        settings: those that are not the defaults override what it was saved with.
        asked: the first question, or nothing.

    Raises:
        SnapshotError: it is none, damaged, of a newer format or another model.
    """
    from kvlite.conversation.runner import open_runner
    from kvlite.conversation.snapshot import Snapshot
    from kvlite.model.chat_template import tokens_of

    given = {
        each.name: getattr(settings, each.name)
        for each in fields(settings)
        if getattr(settings, each.name) != each.default
    }
    with Snapshot(path) as saved:
        about = saved.about
        own = {"model": about.model, "weights": about.settings.get("weights", "auto")}
        with screen.status("Loading the model") as status:
            runner = open_runner(
                settings.replace({**own, **given}),
                status.update,
                lambda tokenizer, max_context: (
                    tokens_of(tokenizer, asked, max_context) + (about.tokens if about.light else 0)
                ),
            )
        _say_plan(runner, screen)
        late = {name: given[name] for name in given if name not in own}
        chosen = saved.settings(runner.settings).replace(late)
        return runner, _opened(runner, saved, chosen, screen)


def from_library(
    runner: "Runner", documents: Sequence["Document"], screen: "Console"
) -> "Conversation | None":
    """Documents as they were read before, if they were; what is wrong with that is said, and no
    reason not to read them now."""
    from kvlite.conversation import library
    from kvlite.conversation.snapshot import Snapshot

    entry = library.matching(runner.model, documents, runner.settings)
    if entry is None or entry.about is None:
        return None
    try:
        with Snapshot(entry.path) as saved:
            talk = _opened(runner, saved, runner.settings, screen)
    except SnapshotError as error:
        screen.print(f"kvlite: {error}")
        return None
    library.used(entry.path)
    screen.print(
        f"Opened {entry.name}, read {library.ago(entry.about.created)} "
        f"({entry.about.tokens:,} tokens, {readable(entry.nbytes)}); --no-library reads it anew.",
        style="dim",
    )
    return talk


def _opened(
    runner: "Runner", saved: "Snapshot", settings: Settings, screen: "Console"
) -> "Conversation":
    from kvlite.conversation.conversation import Conversation

    talk = Conversation(runner.model, settings)
    if saved.about.light:
        with reading_bar(screen, "Reading") as bar:
            saved.restore(talk, callbacks=Callbacks(bar.update, bar.note))
    else:
        with reading_bar(screen, "Opening") as bar:
            saved.restore(talk, bar.update)
    return talk
