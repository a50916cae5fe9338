"""`kvlite bench fidelity`: distributions beside the full cache's."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli.bench.options import (
    KV_BITS,
    METHODS,
    NO_RECALL,
    RECALL_BITS,
    Budgets,
    Json,
    KVBits,
    Methods,
    Out,
    Recall,
    RecallBits,
    Tokens,
)
from kvlite.cli.bench.run import Done, Measured, Measurement, run
from kvlite.cli.opening import require_files
from kvlite.cli.options import with_model
from kvlite.config.settings import Settings

if TYPE_CHECKING:
    from kvlite.conversation.runner import Runner


@with_model
def fidelity(
    settings: Settings,
    file: Annotated[
        str,
        typer.Argument(help="txt, md, html, pdf or docx; - for standard input; else bundled prose"),
    ] = "",
    tokens: Tokens = [2000],
    after: Annotated[
        int, typer.Option(min=2, help="tokens of the text that are scored after the cut")
    ] = 256,
    method: Methods = METHODS,
    budget: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    recall: Recall = NO_RECALL,
    recall_bits: RecallBits = RECALL_BITS,
    repeats: Annotated[
        int, typer.Option(min=1, help="parts of the text, from its beginning to its end")
    ] = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Read a text, cut the cache, go on with the same text: how far off are the predictions?

    Compares each method with the full cache, token by token: KL divergence and top-1 agreement of
    the distributions, change of the text's negative log-likelihood, and how much of the full
    cache's attention fell on what was kept. With --recall each of these tokens is one of an
    answer, and brings entries back.

    Examples:

      kvlite bench fidelity --tokens 4000 --budget 256 --budget 1024

      kvlite bench fidelity --method full --kv-bits 8 --kv-bits 4 --kv-bits kivi4

      kvlite bench fidelity --tokens 4000 --after 200 --budget 256 --recall off,64,128

      kvlite bench fidelity novel.txt --method snapkv --method h2o --repeats 8 --out run3
    """
    require_files([file] if file else [], settings)
    from kvlite.bench.fidelity import FidelityRow, parts, tallies
    from kvlite.bench.fidelity import fidelity as measured
    from kvlite.bench.grid import choices, recalled, require_memory
    from kvlite.bench.pictures import draw_fidelity
    from kvlite.bench.prose import bundled_prose, digest
    from kvlite.documents import read_document

    ways = recalled(recall, recall_bits)
    grid = choices(method, budget, max(tokens), kv_bits, ways)
    text = read_document(file).text if file else bundled_prose()

    def measure(runner: "Runner", done: Done) -> Measured:
        ids = runner.tokenizer.encode(text)
        starts = parts(len(ids), tokens, after, repeats, runner.shape.max_context)
        require_memory(grid, runner.model, max(tokens) + after)
        total = sum(map(len, starts.values())) * len(grid)
        return total, measured(
            runner.model, ids, grid, lengths=tokens, starts=starts, after=after, done=done
        )

    options = {
        "file": file or "bundled prose",
        "text": digest(text),
        "tokens": tokens,
        "after": after,
        "methods": method,
        "budgets": budget,
        "kv bits": kv_bits,
        "recall": recall,
        "recall bits": recall_bits,
        "repeats": repeats,
    }
    distance = Measurement(
        "fidelity", "Fidelity to the full cache", FidelityRow, measure, tallies, draw_fidelity
    )
    run(distance, settings, options, out, as_json)
