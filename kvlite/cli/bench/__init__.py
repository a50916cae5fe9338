"""`kvlite bench`: measure these methods on this machine."""

import typer

from kvlite.cli.bench.fidelity import fidelity
from kvlite.cli.bench.memory import memory
from kvlite.cli.bench.niah import niah
from kvlite.cli.bench.ruler import ruler
from kvlite.cli.bench.speed import speed
from kvlite.cli.bench.turns import turns

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed, memory and what is still known, on this machine.\n\n"
    "Every command writes its rows to a folder as it goes (--out), and goes on from there when it "
    "was stopped.",
    epilog="Try: kvlite bench niah --tokens 2000 --budget 128 --budget 512 --depths 3",
)
for command in (niah, ruler, turns, fidelity, memory, speed):
    app.command()(command)
