"""`kvlite calibrate`: measure a model once, for the methods that need to know it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvlite.cli.console import output, print_json
from kvlite.cli.opening import require_files, require_out
from kvlite.cli.options import AsJson, with_model
from kvlite.cli.screen import console, reading_bar, tell_of_compiling
from kvlite.config.paths import data_folder, require_writable
from kvlite.config.settings import Settings
from kvlite.documents import read_document

if TYPE_CHECKING:
    from kvlite.model.calibration import Calibration


@with_model
def calibrate(
    settings: Settings,
    named: Annotated[str, typer.Argument(metavar="[MODEL]", help="as --model")] = "",
    text: Annotated[str, typer.Option(help="a file to measure on; else bundled prose")] = "",
    samples: Annotated[int, typer.Option(min=1, help="pieces of the text to read")] = 4,
    tokens: Annotated[int, typer.Option(min=64, help="tokens in each")] = 4096,
    out: Annotated[str, typer.Option(help="write it to this file, not to the data folder")] = "",
    as_json: AsJson = False,
) -> None:
    """Measure what some methods need to know of a model: UNComp's groups of heads and layers, and
    the threshold above which SimLayerKV calls a layer lazy.

    Takes some minutes. The result is a small JSON file in kvlite's data folder, which belongs to
    the model's weights whatever their name. The threshold needs pieces of more than 2,048 tokens.

    Examples:

      kvlite calibrate

      kvlite calibrate Qwen/Qwen3-8B --text my-reports.pdf

      kvlite ask report.pdf "Who paid?" --model Qwen/Qwen3-8B --method uncomp
    """
    if named:
        settings = settings.replace({"model": named})
    require_out(out)
    require_writable(Path(out).resolve().parent if out else data_folder())
    require_files([text] if text else [], settings)
    from kvlite.bench.calibrate import calibrate as measure
    from kvlite.bench.calibrate import pieces_of
    from kvlite.bench.prose import bundled_prose
    from kvlite.conversation.runner import open_runner
    from kvlite.model.calibration import calibration_path

    prose = read_document(text).text if text else bundled_prose()
    tell_of_compiling(console())
    with console().status("Loading the model") as status:
        runner = open_runner(settings, status.update)
    pieces = pieces_of(runner.model, prose, samples, tokens)
    with reading_bar(console(), "Measuring") as bar:
        found = measure(runner.model, settings.model, text or "bundled prose", pieces, bar.update)
    path = Path(out) if out else calibration_path(found.fingerprint)
    before = runner.model.calibration
    if before is not None and found.lazy_threshold is None:
        found = replace(found, lazy_threshold=before.lazy_threshold)
    found.save(path)
    if as_json:
        print_json({**found.to_json(), "path": str(path)})
        return
    _show(found, path)


def _show(found: "Calibration", path: Path) -> None:
    from kvlite.methods.rank import layer_groups

    table = Table("layer", "group", "effective rank", "of its KV heads", "attention to the ends")
    groups = layer_groups(found.layer_ranks, 1.0)
    for layer, heads in enumerate(found.head_ranks):
        table.add_row(
            str(layer),
            str(groups[layer] + 1),
            f"{found.layer_ranks[layer]:.2f}",
            " ".join(f"{rank:.1f}" for rank in heads),
            f"{found.lazy_shares[layer]:.3f}",
        )
    screen = output()
    screen.print(table)
    threshold = found.lazy_threshold
    if threshold is None:
        screen.print(
            "No threshold for simlayerkv: it needs full attention in every layer, and "
            "pieces of more than 2,048 tokens (--tokens)"
        )
    else:
        lazy = sum(share > threshold for share in found.lazy_shares)
        screen.print(f"simlayerkv: {threshold} ({lazy} of {len(groups)} layers lazy)")
    screen.print(f"Saved in {path}")
