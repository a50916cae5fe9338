"""Answers on standard output, as text or as JSON, and their account beside it."""

from typing import TYPE_CHECKING

from kvlite.cli.console import print_json, write
from kvlite.cli.screen import reading

if TYPE_CHECKING:
    from rich.console import Console

    from kvlite.conversation.metrics import Ledger
    from kvlite.conversation.session import Begin


def print_answer(
    begin: "Begin", screen: "Console", as_json: bool, *, account: bool = True
) -> "Ledger":
    """Print what is answered, and the account of it.

    Args:
        begin: what answers.
        account: whether text is followed by it, on the screen.
    """
    pieces = []
    with reading(screen) as (bar, cancel):
        for piece in begin(bar.update, bar.note, cancel):
            bar.close()
            pieces.append(piece)
            if not as_json:
                write(piece.text)
    ledger = pieces[-1].ledger
    if as_json:
        answer = "".join(piece.text for piece in pieces)
        print_json({"answer": answer, **ledger.to_json()}, readable=True)
        return ledger
    write("\n")
    if account:
        screen.print(ledger.line(), style="dim")
    return ledger
