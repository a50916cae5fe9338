"""`kvlite bench speed`: time and memory beside transformers."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli.bench.options import (
    KV_BITS,
    Json,
    Out,
    Tokens,
)
from kvlite.cli.bench.run import Done, Measured, Measurement, run
from kvlite.cli.options import with_model
from kvlite.config.settings import Settings
from kvlite.config.units import parse_number
from kvlite.errors import SettingError

if TYPE_CHECKING:
    from kvlite.conversation.runner import Runner


@with_model
def speed(
    settings: Settings,
    tokens: Tokens = [2000, 7000],
    method: Annotated[str, typer.Option(help="as for `kvlite ask`")] = Settings.method,
    budget: Annotated[str, typer.Option(help="as for `kvlite ask`")] = "512",
    kv_bits: Annotated[str, typer.Option(help="as for `kvlite ask`")] = KV_BITS[0],
    recall: Annotated[
        str, typer.Option(help="entries that each token of an answer may bring back, or off")
    ] = "off",
    repeats: Annotated[int, typer.Option(min=1, help="pairs of runs; medians are given")] = 5,
    new_tokens: Annotated[int, typer.Option(min=3, help="tokens generated in each run")] = 24,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Read and answer beside transformers' own `generate`: time, peak memory, KV bytes.

    Each repetition runs both programs back to back, so that their ratio means something on a
    machine that is never quite quiet. Ratios below 1 are in kvlite's favour.

    Examples:

      kvlite bench speed --tokens 7000 --method snapkv

      kvlite bench speed --method full --repeats 3 --json

      kvlite bench speed --tokens 7000 --budget 256 --recall 128
    """
    entries = 0 if recall == "off" else parse_number(recall, whole=True)
    if entries is None:
        raise SettingError(f"--recall {recall!r} is no number of entries: give 128, or off")
    settings = settings.replace(
        {
            "method": method,
            "budget": budget,
            "kv_bits": kv_bits,
            "recall": "off" if recall == "off" else "ram",
            "recall_entries": entries,
        }
    )
    from kvlite.bench.grid import require_room
    from kvlite.bench.prose import bundled_prose
    from kvlite.bench.speed import SpeedRow, compare_all, load_reference
    from kvlite.cache import parse_kv_bits
    from kvlite.methods.budget import method_and_budget

    method_and_budget(method, budget)
    parse_kv_bits(kv_bits)

    def measure(runner: "Runner", done: Done) -> Measured:
        ids = runner.tokenizer.encode(bundled_prose())
        require_room(max(tokens), new_tokens, len(ids), runner.shape.max_context)
        return len(tokens), compare_all(
            runner,
            load_reference(runner),
            ids,
            lengths=tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            done=done,
        )

    options = {
        "tokens": tokens,
        "method": method,
        "budget": budget,
        "kv bits": kv_bits,
        "recall": recall,
        "repeats": repeats,
        "new tokens": new_tokens,
    }
    times = Measurement("speed", "Speed beside transformers", SpeedRow, measure, list)
    run(times, settings, options, out, as_json)
