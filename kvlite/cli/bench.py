"""`kvlite bench`: measure these methods on this machine."""

import json
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import typer

from kvlite.cli.screen import console, reading_bar
from kvlite.errors import SettingError
from kvlite.settings import EMBEDDED_MODEL, Settings

if TYPE_CHECKING:
    from kvlite.bench.niah import Kind
    from kvlite.runner import Runner

app = typer.Typer(no_args_is_help=True, help="Measure speed, memory and recall on this machine.")

KINDS = ["number", "sentence"]
DEFAULT_METHODS = ["full", "snapkv", "pyramidkv", "kvx", str(Settings.method)]

Model = Annotated[str, typer.Option(help="as for `kvlite ask`")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]
Tokens = Annotated[list[int], typer.Option(min=100, help="prompt length; may be repeated")]
Methods = Annotated[list[str], typer.Option(help="as for `kvlite ask`; may be repeated")]
Budgets = Annotated[list[int], typer.Option(min=1, help="entries a KV head; may be repeated")]
Kinds = Annotated[list[str], typer.Option(help="number or sentence; may be repeated")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")]


class _Line(Protocol):
    def cells(self) -> dict[str, str]: ...


@app.command()
def speed(
    tokens: Tokens = [2000, 7000],
    method: Annotated[str, typer.Option(help="as for `kvlite ask`")] = Settings.method,
    budget: Annotated[str, typer.Option(help="as for `kvlite ask`")] = "512",
    repeats: Annotated[int, typer.Option(min=1, help="pairs of runs; medians are given")] = 5,
    new_tokens: Annotated[int, typer.Option(min=3, help="tokens generated in each run")] = 24,
    model: Model = EMBEDDED_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Read and answer beside transformers' own `generate`: time, peak memory, KV bytes.

    Each repetition runs both programs back to back, so that their ratio means something on a
    machine that is never quite quiet. Ratios below 1 are in kvlite's favour.

    Examples:

      kvlite bench speed --tokens 7000 --method snapkv

      kvlite bench speed --method full --repeats 3 --json
    """
    settings = Settings(model=model, method=method, budget=budget, device=device, dtype=dtype)
    from kvlite.bench.speed import compare, load_reference

    runner, prose = _opened(settings, max(tokens))
    ids = runner.tokenizer.encode(prose)
    reference = load_reference(runner)
    with reading_bar(console(), "Timing") as bar:
        total, done = len(tokens) * repeats, 0

        def count() -> None:
            nonlocal done
            done += 1
            bar.update(done, total)

        rows = [
            compare(
                runner,
                reference,
                ids[:length],
                new_tokens=new_tokens,
                repeats=repeats,
                done=count,
            )
            for length in tokens
        ]
    _report([row.to_json() for row in rows], rows, as_json)


@app.command()
def niah(
    tokens: Tokens = [2000],
    method: Methods = DEFAULT_METHODS,
    budget: Budgets = [512],
    depths: Annotated[int, typer.Option(min=1, help="places of the needle, evenly spread")] = 9,
    kind: Kinds = KINDS,
    model: Model = EMBEDDED_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Hide a needle in real prose and ask for it: which methods still find it?

    Each prompt is read once for all methods and budgets. Found means that the whole number, or
    the whole sentence, is in the answer; leading is the share of a number's digits right from the
    left, or of a sentence's words; surprise is nats a token of it, had the answer begun rightly.

    Examples:

      kvlite bench niah --tokens 2000 --tokens 7000 --budget 256 --budget 1024

      kvlite bench niah --method snapkv --method kvx:pool=31 --depths 3 --json
    """
    settings = Settings(model=model, device=device, dtype=dtype)
    for each in kind:
        if each not in KINDS:
            raise SettingError(f"--kind {each!r} is not one of {', '.join(KINDS)}")
    from kvlite.bench.niah import niah as grid
    from kvlite.bench.niah import tallies
    from kvlite.methods import parse_method

    choices = []
    for chosen in map(parse_method, method):
        # A method that frees nothing is the same at every budget.
        sizes = budget if chosen.frees_memory else [max(tokens)]
        choices += list(product([chosen], sizes))
    for chosen, size in choices:
        chosen.check(size)
    runner, prose = _opened(settings, max(tokens))
    places = [index / max(1, depths - 1) for index in range(depths)]
    total = len(tokens) * len(kind) * depths * len(choices)
    rows = []
    with reading_bar(console(), "Looking for needles") as bar:
        for row in grid(
            runner,
            choices,
            lengths=tokens,
            depths=places,
            kinds=cast("list[Kind]", kind),
            prose=prose,
        ):
            rows.append(row)
            bar.update(len(rows), total)
    _report([row.to_json() for row in rows], tallies(rows), as_json)


def _opened(settings: Settings, longest: int) -> "tuple[Runner, str]":
    """The runner, and prose of at least `longest` tokens."""
    from kvlite.bench.niah import NEW_TOKENS, bundled_prose
    from kvlite.runner import open_runner

    with console().status("Loading the model") as status:
        runner = open_runner(settings, status.update)
    prose = bundled_prose()
    held = len(runner.tokenizer.encode(prose))
    limit = min(held, runner.shape.max_context - NEW_TOKENS)
    if longest > limit:
        raise SettingError(
            f"--tokens {longest} is too long: give up to {limit} (the bundled prose has {held:,} "
            f"tokens, the model was trained for {runner.shape.max_context:,})"
        )
    return runner, prose


def _report(plain: list[dict[str, Any]], lines: Sequence[_Line], as_json: bool) -> None:
    from kvlite.bench.machine import describe

    machine = describe()
    if as_json:
        print(json.dumps({"machine": machine, "rows": plain}))
        return
    from rich.console import Console
    from rich.table import Table

    caption = ", ".join(f"{name} {value}" for name, value in machine.items())
    table = Table(*lines[0].cells(), caption=caption)
    for line in lines:
        table.add_row(*line.cells().values())
    Console().print(table)
