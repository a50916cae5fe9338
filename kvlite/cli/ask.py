"""`kvlite ask`: questions about documents."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli import BAD_INPUT, INTERRUPTED
from kvlite.cli.ask_each import USAGE, Printing, answer_each, said_about, sorted_out
from kvlite.cli.first_start import with_first_model
from kvlite.cli.opening import FromLibrary, documents_to_send, open_files, require_files
from kvlite.cli.options import AsJson, Quiet, with_resolved
from kvlite.cli.screen import at_terminal, console, lines_said, print_answer, reading
from kvlite.cli.server_chat import Server, answer_lines, talk_with
from kvlite.config.resolve import Resolved
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import ContextError, KvliteError, SettingError, Stopped, sentence
from kvlite.model.chat_template import all_of

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation
    from kvlite.conversation.metrics import GenerationMetrics, Piece

_HINT = "Ask, one question a line. Ctrl-D ends."
_PARTS = "; --relevant reads the parts that a text search finds for the question"
_STOPPED = "Stopped while reading; nothing was answered."

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE... [QUESTION]...",
        help="documents (text, pdf, Office, html, epub, mail); - for standard input; or a .kv file "
        "that `kvlite read` or a conversation left; then what to ask: without, questions are asked "
        "one after another",
    ),
]
Sources = Annotated[
    bool, typer.Option("--sources", help="print the three passages each answer came from")
]
Relevant = Annotated[
    bool,
    typer.Option(
        "--relevant",
        help="of documents that are too long for the model, read the parts that a text search "
        "finds for the question",
    ),
]


@with_resolved
def ask(
    resolved: Resolved,
    words: Words = None,
    library: FromLibrary = True,
    server: Server = "",
    sources: Sources = False,
    relevant: Relevant = False,
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

      kvlite ask book.epub "Who is the narrator's brother?" --relevant

      kvlite ask report.pdf

      kvlite ask report.kv "And in 2025?"

      kvlite ask report.pdf "Who signed?" --server http://127.0.0.1:8000

      cat log.txt | kvlite ask - "What failed first?" --json
    """
    files, questions = sorted_out(words or ())
    how = Printing(console(quiet), resolved, as_json=as_json, sources=sources)
    if relevant and (server or len(questions) != 1):
        raise SettingError(
            "--relevant needs the model here and one question, for which it searches: ask one, "
            "without --server"
        )
    if server:
        _ask_server(server, files, questions, how)
    elif code := _ask_here(files, questions, how, library=library, parts=relevant):
        raise typer.Exit(code)


def _ask_server(server: str, files: Sequence[str], questions: Sequence[str], how: Printing) -> None:
    if how.sources:
        raise SettingError("--sources needs the model here: leave out --sources, or --server")
    read = documents_to_send(files, how.screen, how.resolved.settings)
    for each in read:
        if each.note:
            how.screen.print(f"Note: {each.note}", style="yellow")
    asked = questions or lines_said(how.screen, _HINT)
    talk = talk_with(server, how.resolved, read)
    answer_lines(talk, asked, how.resolved, how.screen, as_json=how.as_json, apart=True)


def _ask_here(
    files: Sequence[str], questions: Sequence[str], how: Printing, *, library: bool, parts: bool
) -> int:
    require_files(files, how.resolved.settings)
    how = replace(how, resolved=with_first_model(how.resolved, how.screen, files))
    # One of several questions may be too long, and the others are answered.
    first = questions[0] if len(questions) == 1 else ""
    try:
        runner, found, documents = open_files(
            files, how.resolved.settings, first, how.screen, library=library, parts=parts
        )
    except ContextError as error:
        raise ContextError(f"{error}{'' if parts or not first else _PARTS}") from error
    talk = found or runner.conversation()
    if documents:
        talk.documents = tuple(documents)
    if len(questions) < 2:
        # There is no undo here, so no checkpoints are kept.
        talk.settings = talk.settings.replace({"checkpoint_limit": "0MB"})
    try:
        if len(questions) == 1:
            made = _answer(talk, questions[0], how)
            return INTERRUPTED if made.finish_reason == "interrupted" else _code(made)
        if found is None:
            with reading(how.screen) as (_, callbacks):
                talk.read_ahead(all_of(documents), callbacks=callbacks)
    except Stopped:
        how.screen.print(_STOPPED)
        return INTERRUPTED
    return answer_each(talk, questions, how) if questions else _answer_all(talk, how)


def _answer_all(talk: "Conversation", how: Printing) -> int:
    asked, code = "", 0
    for asked in lines_said(how.screen, _HINT):
        try:
            code = _code(_answer(talk, asked, how)) or code
        except Stopped:
            how.screen.print(_STOPPED)
        except KvliteError as error:
            how.screen.print(f"kvlite: {sentence(how.resolved.noted(error))}")
            code = BAD_INPUT
    if not asked and not at_terminal():
        raise SettingError(f"standard input has no question: {USAGE}")
    return code


def _code(metrics: "GenerationMetrics") -> int:
    return BAD_INPUT if metrics.failure else 0


def _answer(talk: "Conversation", asked: str, how: Printing) -> "GenerationMetrics":
    message = said_about(talk, asked)

    def begin(callbacks: Callbacks) -> "Iterator[Piece]":
        return talk.stream(message, callbacks=callbacks)

    return print_answer(begin, how.screen, how.as_json, sources=how.sources)
