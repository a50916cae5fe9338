"""`kvlite bench turns`: several questions about one document, one after the other."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli.bench.options import (
    KV_BITS,
    METHODS,
    RECALL_BITS,
    Budgets,
    Json,
    KVBits,
    Methods,
    Out,
    Recall,
    RecallBits,
    Repeats,
    Tokens,
)
from kvlite.cli.bench.run import Done, Measured, Measurement, run
from kvlite.cli.options import with_model
from kvlite.config.settings import Settings

if TYPE_CHECKING:
    from kvlite.conversation.runner import Runner


@with_model
def turns(
    settings: Settings,
    tokens: Tokens = [2000],
    method: Methods = METHODS,
    budget: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    recall: Recall = ["off", str(Settings.recall_entries)],
    recall_bits: RecallBits = RECALL_BITS,
    questions: Annotated[
        int, typer.Option(min=1, help="codes in the text, each asked for in a turn of its own")
    ] = 8,
    orders: Annotated[
        int, typer.Option(min=1, help="orders in which they are asked, a conversation each")
    ] = 1,
    repeats: Repeats = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Hide several codes in real prose and ask for one after the other, in one conversation: is the
    last question answered as well as the first, in whichever order?

    The first question comes with the text, so that entries are kept for it; what the others ask
    for is dropped by then, or comes back (--recall). Beside every method is what it answers of
    the questions that the full cache answers: small models fail some of them in any case. By
    place: how many first questions were answered, how many second ones, and so on.

    Examples:

      kvlite bench turns --tokens 2000 --tokens 7000 --budget 256 --recall off,0,128 --orders 2

      kvlite bench turns --method snapkv --questions 4 --repeats 5 --out run4

      kvlite bench turns --recall 128 --recall-bits 16,4 --json
    """
    from kvlite.bench.grid import choices, recalled
    from kvlite.bench.pictures import draw_turns
    from kvlite.bench.prose import bundled_prose
    from kvlite.bench.turns import TurnRow, measured, tallies

    grid = choices(method, budget, max(tokens), kv_bits, recalled(recall, recall_bits))

    def measure(runner: "Runner", done: Done) -> Measured:
        return measured(
            runner,
            bundled_prose(),
            grid,
            lengths=tokens,
            questions=questions,
            orders=orders,
            repeats=repeats,
            done=done,
        )

    options = {
        "tokens": tokens,
        "methods": method,
        "budgets": budget,
        "kv bits": kv_bits,
        "recall": recall,
        "recall bits": recall_bits,
        "questions": questions,
        "orders": orders,
        "seeds": list(range(repeats)),
    }
    title = "Questions one after the other"
    run(
        Measurement("turns", title, TurnRow, measure, tallies, draw_turns),
        settings,
        options,
        out,
        as_json,
    )
