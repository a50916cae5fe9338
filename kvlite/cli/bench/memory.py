"""`kvlite bench memory`: bytes held and the peak."""

from typing import TYPE_CHECKING

from kvlite.cli.bench.options import (
    KV_BITS,
    METHODS,
    Budgets,
    Json,
    KVBits,
    Methods,
    Out,
    Tokens,
)
from kvlite.cli.bench.run import Done, Measured, Measurement, run
from kvlite.cli.options import with_model
from kvlite.config.settings import Settings

if TYPE_CHECKING:
    from kvlite.conversation.runner import Runner


@with_model
def memory(
    settings: Settings,
    tokens: Tokens = [2000],
    method: Methods = METHODS,
    budget: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Read a text by each method: bytes of the KV cache, and peak of live tensors over the weights.

    Counted, not estimated: every tensor that torch hands out, or on CUDA what the allocator gave.

    Examples:

      kvlite bench memory --tokens 2000 --tokens 7000 --budget 256 --budget 1024

      kvlite bench memory --method full --method kvx --kv-bits 16 --kv-bits 4 --json
    """
    from kvlite.bench.grid import choices, require_room
    from kvlite.bench.memory import MemoryRow, lines
    from kvlite.bench.memory import memory as measured
    from kvlite.bench.prose import bundled_prose

    grid = choices(method, budget, max(tokens), kv_bits)

    def measure(runner: "Runner", done: Done) -> Measured:
        ids = runner.tokenizer.encode(bundled_prose())
        require_room(max(tokens), 0, len(ids), runner.shape.max_context)
        return len(tokens) * len(grid), measured(runner, ids, grid, lengths=tokens, done=done)

    options = {"tokens": tokens, "methods": method, "budgets": budget, "kv bits": kv_bits}
    bytes_held = Measurement("memory", "Memory of reading", MemoryRow, measure, lines)
    run(bytes_held, settings, options, out, as_json)
