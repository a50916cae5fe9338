"""`kvlite plan`: what will fit, before anything is loaded."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvlite.cli.console import output, print_json
from kvlite.cli.opening import documents_of, uncollected
from kvlite.cli.options import AsJson, with_settings
from kvlite.cli.screen import console
from kvlite.config.settings import Settings
from kvlite.documents import require_readable
from kvlite.errors import SettingError
from kvlite.model.chat_template import all_of
from kvlite.model.source import config_here

if TYPE_CHECKING:
    from kvlite.planner.max_context import MaxContext

TOKENS = 32_768
# An exit code.
DOES_NOT_FIT = 1
# Cells of a table that tell a line from others, and what it says.
_Line = tuple[tuple[str, ...], str]


@with_settings
def plan(
    settings: Settings,
    named: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="as --model; of a Hugging Face id only config.json is fetched, of a folder no "
            "more is needed",
        ),
    ] = "",
    context: Annotated[
        int | None,
        typer.Option(min=1, help=f"tokens to read; left out, {TOKENS:,} or what the model holds"),
    ] = None,
    doc: Annotated[str | None, typer.Option(help="a document to read")] = None,
    card: Annotated[
        str, typer.Option(help='the card\'s name, for its speed, e.g. "RTX 4090"')
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show how much memory a model will take, phase by phase, and how long a text fits.

    Needs only the model's config: no weights, no GPU. Without a GPU here, --vram is that of the
    card to plan for; with --device cpu it is a part of this machine's memory.

    Exit codes: 0 if the text fits; 1 if it does not; 2 where anything was refused.

    Examples:

      kvlite plan Qwen/Qwen3-8B --vram 24GiB --card "RTX 4090"

      kvlite plan ./my-model --vram 12GiB --context 100000 --json

      kvlite plan --doc report.pdf --device cpu --vram 1GiB
    """
    if context is not None and doc is not None:
        raise SettingError("give --context or --doc, not both")
    if named:
        settings = settings.replace({"model": named})
    if doc is not None:
        require_readable(doc)
    screen = console()
    config_here(settings.model)
    with uncollected():
        from kvlite.planner.candidates import open_planner
        from kvlite.planner.max_context import reaches

        with screen.status("Reading the config") as status:
            text = None if doc is None else all_of(documents_of([doc], settings, screen))
            planner = open_planner(settings, status.update, card=card, reads_text=text is not None)
            longest = planner.shape.max_context
            most = longest - settings.planned_tokens
            tokens = context or min(TOKENS, max(1, most))
            is_guess = False
            if text is not None:
                counted = planner.tokens_of(text)
                tokens, is_guess = counted or len(text) // 4 + 1, counted is None
            made = planner.best(min(tokens, max(1, most)))
        if not as_json:
            from kvlite.cli.chat.views import plan_view

            if tokens > made.tokens:
                output().print(
                    f"The model was trained for {longest:,} tokens, and {tokens:,} were asked for."
                )
            output().print(plan_view(made, output().width))
            if is_guess:
                output().print(
                    f"Its {tokens:,} tokens are a guess, one for 4 characters: the model's "
                    "tokenizer cannot be read here."
                )
            if card and made.room.bandwidth is None:
                output().print(f"How fast {card} answers is not known.")
        with screen.status("Looking how long a text fits"):
            rows = reaches(planner)
    if as_json:
        about = {"asked_tokens": tokens, "is_guess": is_guess, "max_context": longest}
        print_json({**made.to_json(), **about, "fitting": [row.to_json() for row in rows]})
    else:
        _show_fitting(rows)
    if tokens > made.tokens or not made.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _show_fitting(rows: "list[MaxContext]") -> None:
    lines: list[_Line] = [((row.weights, row.method, row.kv_bits), row.shown) for row in rows]
    for at in (2, 0, 1):
        lines = _joined(lines, at)
    table = Table("weights", "method", "KV bits", "longest text that fits")
    for cells, shown in lines:
        table.add_row(*cells, shown)
    output().print(table)


def _joined(lines: list[_Line], at: int) -> list[_Line]:
    """Lines that differ in one cell alone as one, which names what each has there."""
    found: dict[_Line, list[str]] = {}
    for cells, shown in lines:
        found.setdefault(((*cells[:at], "", *cells[at + 1 :]), shown), []).append(cells[at])
    return [
        ((*cells[:at], ", ".join(each), *cells[at + 1 :]), shown)
        for (cells, shown), each in found.items()
    ]
