"""`kvlite ask`: questions about documents."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli import BAD_INPUT, INTERRUPTED
from kvlite.cli.ask_each import USAGE, answer_each, said_about, sorted_out
from kvlite.cli.first_start import with_first_model
from kvlite.cli.opening import FromLibrary, documents_to_send, open_files, require_files
from kvlite.cli.options import AsJson, Quiet, with_resolved
from kvlite.cli.screen import at_terminal, console, lines_said, print_answer, reading
from kvlite.cli.server_chat import Server, ask_server
from kvlite.config.resolve import Resolved
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import KvliteError, SettingError, Stopped, sentence

if TYPE_CHECKING:
    from rich.console import Console

    from kvlite.conversation.conversation import Conversation
    from kvlite.conversation.metrics import GenerationMetrics, Piece

_HINT = "Ask, one question a line. Ctrl-D ends."


@with_resolved
def ask(
    resolved: Resolved,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE... [QUESTION]...",
            help="documents (text, pdf, Office, html, epub, mail); - for standard input; or a .kv "
            "file that `kvlite read` or a conversation left; then what to ask: without, questions "
            "are asked one after another",
        ),
    ] = None,
    library: FromLibrary = True,
    server: Server = "",
    sources: Annotated[
        bool, typer.Option("--sources", help="print the three passages each answer came from")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Ask a question about one document or several, or many questions.

    Reads all of it layer by layer, keeps what the question needs, answers, and says what the
    answer was made from and which passage it came from. Ctrl-C ends an answer where it stands.

    Several questions are each answered as if it alone were asked, in the same decode steps as far
    as memory allows. The documents are read once. With --json the answers are a list.

    Without a question, the documents are read once and questions are taken from the terminal, or
    line by line from standard input, until that ends (Ctrl-D).

    What `kvlite read` has read already, with the same model, is opened instead.

    Exit codes: 0; 2 where anything was refused, or an answer ended for lack of memory or before it
    was what --schema asks for, even if other questions were answered; 130 after Ctrl-C, unless more
    questions were to come.

    Examples:

      kvlite ask report.pdf "What were the costs in 2024?"

      kvlite ask a.docx b.md "Where do these disagree?" --budget 25%

      kvlite ask report.pdf "Who signed?" "When?" "For how long?"

      kvlite ask report.pdf

      kvlite ask report.kv "And in 2025?"

      kvlite ask report.pdf "Who signed?" --server http://127.0.0.1:8000

      cat log.txt | kvlite ask - "What failed first?" --json
    """
    files, questions = sorted_out(words or ())
    settings, screen = resolved.settings, console(quiet)
    if server:
        for flag, given in (("--sources", sources), ("--draft", bool(settings.draft))):
            if given:
                raise SettingError(f"{flag} needs the model here: leave out {flag}, or --server")
        read = documents_to_send(files, screen, ocr=settings.ocr)
        asked = iter(questions) if questions else lines_said(screen, _HINT)
        if not ask_server(server, read, asked, resolved, screen, as_json=as_json):
            raise typer.Exit(BAD_INPUT)
        return
    require_files(files, settings)
    resolved = with_first_model(resolved, screen, files)
    settings = resolved.settings
    # One of several questions may be too long, and the others are answered.
    first = questions[0] if len(questions) == 1 else ""
    runner, found, documents = open_files(files, settings, first, screen, library=library)
    talk = found or runner.conversation()
    if documents:
        talk.documents = tuple(documents)
    if len(questions) < 2:
        # There is no undo here, so no checkpoints are kept.
        talk.settings = talk.settings.replace({"checkpoint_limit": "0MB"})
    try:
        if len(questions) == 1:
            made = _answer(talk, questions[0], screen, as_json=as_json, sources=sources)
            if made.finish_reason == "interrupted":
                raise typer.Exit(INTERRUPTED)
            if made.failure:
                raise typer.Exit(BAD_INPUT)
            return
        if found is None:
            from kvlite.model.chat_template import all_of

            with reading(screen) as (_, callbacks):
                talk.read_ahead(all_of(documents), callbacks=callbacks)
    except Stopped:
        screen.print("Stopped while reading; nothing was answered.")
        raise typer.Exit(INTERRUPTED) from None
    if questions:
        code = answer_each(talk, questions, screen, resolved, as_json=as_json, sources=sources)
        if code:
            raise typer.Exit(code)
        return
    _answer_all(talk, screen, resolved, as_json=as_json, sources=sources)


def _answer_all(
    talk: "Conversation", screen: "Console", resolved: Resolved, *, as_json: bool, sources: bool
) -> None:
    """Answer questions until there are no more.

    Raises:
        SettingError: there was none.
        typer.Exit: one of them could not be answered.
    """
    asked, failed = "", False
    for asked in lines_said(screen, _HINT):
        try:
            made = _answer(talk, asked, screen, as_json=as_json, sources=sources)
            failed |= bool(made.failure)
        except Stopped:
            screen.print("Stopped while reading; nothing was answered.")
        except KvliteError as error:
            screen.print(f"kvlite: {sentence(resolved.noted(error))}")
            failed = True
    if not asked and not at_terminal():
        raise SettingError(f"standard input has no question: {USAGE}")
    if failed:
        raise typer.Exit(BAD_INPUT)


def _answer(
    talk: "Conversation", asked: str, screen: "Console", *, as_json: bool, sources: bool
) -> "GenerationMetrics":
    """Print the answer to a question, which goes with the documents the first time."""
    message = said_about(talk, asked)

    def begin(callbacks: Callbacks) -> "Iterator[Piece]":
        return talk.stream(message, callbacks=callbacks)

    return print_answer(begin, screen, as_json, sources=sources)
