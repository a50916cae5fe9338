"""`kvlite ask`: a question about documents."""

import json
import os
import sys
from typing import Annotated

import typer

from kvlite.cli import INTERRUPTED
from kvlite.cli.options import with_settings
from kvlite.cli.screen import console, reading_bar, stop_on_interrupt
from kvlite.errors import SettingError, Stopped
from kvlite.settings import Settings

_USAGE = 'give a file and a question: kvlite ask report.pdf "What is it about?"'


@with_settings
def ask(
    settings: Settings,
    files: Annotated[
        list[str] | None,
        typer.Argument(help="txt, md, html, pdf or docx files; - for standard input"),
    ] = None,
    question: Annotated[str, typer.Argument(help="what to ask")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of text")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="print nothing but the answer")
    ] = False,
) -> None:
    """Ask a question about one document or several.

    Reads all of it layer by layer, keeps what the question needs, answers, and says what the
    answer was made from. Ctrl-C ends an answer where it stands.

    Examples:

      kvlite ask report.pdf "What were the costs in 2024?"

      kvlite ask a.docx b.md "Where do these disagree?" --budget 25%

      cat log.txt | kvlite ask - "What failed first?" --json
    """
    if not files or not question.strip():
        raise SettingError(_USAGE)
    if os.path.isfile(question):
        raise SettingError(f"{question!r} is a file, so there is no question: {_USAGE}")
    from kvlite.documents import read_document
    from kvlite.ledger import Piece
    from kvlite.prompts import question_about
    from kvlite.runner import open_runner

    screen = console(quiet)
    text = question_about([read_document(file) for file in files], question)
    with screen.status("Loading the model") as status:
        runner = open_runner(settings, status.update)
    pieces: list[Piece] = []
    with stop_on_interrupt() as cancel, reading_bar(screen, "Reading") as bar:
        stream = runner.conversation().stream(text, progress=bar.update, cancel=cancel)
        try:
            for piece in stream:
                bar.close()
                if not pieces:
                    for note in piece.ledger.notes:
                        screen.print(f"Note: {note}", style="yellow")
                pieces.append(piece)
                if not as_json:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        except Stopped:
            bar.close()
            screen.print("Stopped while reading; nothing was answered.")
            raise typer.Exit(INTERRUPTED) from None
    ledger = pieces[-1].ledger
    if as_json:
        answer = "".join(piece.text for piece in pieces)
        readable = sys.stdout.encoding.lower().startswith("utf")
        print(json.dumps({"answer": answer, **ledger.to_json()}, ensure_ascii=not readable))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        screen.print(ledger.line(), style="dim")
    if ledger.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)
