"""Answers on standard output, as text or as JSON."""

from typing import TYPE_CHECKING

from kvlite.cli.console import print_json, write
from kvlite.cli.screen import reading

if TYPE_CHECKING:
    from rich.console import Console

    from kvlite.conversation.metrics import GenerationMetrics
    from kvlite.conversation.session import Begin


def print_answer(
    begin: "Begin", screen: "Console", as_json: bool, *, account: bool = True
) -> "GenerationMetrics":
    """Print an answer as it comes; after text, a line on the screen says what it was made from,
    unless `account` is False."""
    pieces = []
    with reading(screen) as (bar, callbacks):
        for piece in begin(callbacks):
            bar.close()
            pieces.append(piece)
            if not as_json:
                write(piece.text)
    metrics = pieces[-1].metrics
    if as_json:
        answer = "".join(piece.text for piece in pieces)
        print_json({"answer": answer, **metrics.to_json()}, readable=True)
        return metrics
    write("\n")
    if account:
        screen.print(metrics.line(), style="dim")
    return metrics
