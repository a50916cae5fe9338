"""`kvlite tune`: measure settings on one's own document, and keep the best."""

import shlex
from typing import Annotated, Any

import typer

from kvlite.bench.options import TUNE_MINUTES, TUNE_PROFILE, TuneOptions
from kvlite.cli.bench.run import Out
from kvlite.cli.console import output, say
from kvlite.cli.opening import require_files
from kvlite.cli.options import AsJson, as_flags, with_fields, with_model
from kvlite.cli.screen import console
from kvlite.config.paths import config_folder, require_writable
from kvlite.config.profiles import Profiles
from kvlite.config.settings import EMBEDDED_MODEL, Settings
from kvlite.model.source import lasting_name


@with_model
@with_fields(TuneOptions)
def tune(
    settings: Settings,
    *,
    file: Annotated[str, typer.Argument(help="the document")],
    minutes: Annotated[
        float, typer.Option(min=0.01, max=10_000, help="how long it may take")
    ] = TUNE_MINUTES,
    save: Annotated[str, typer.Option(help="the profile's name")] = TUNE_PROFILE,
    force: Annotated[
        bool,
        typer.Option("--force", help=f"overwrite a profile of that name; {TUNE_PROFILE} always is"),
    ] = False,
    out: Out = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Measure methods, budgets and bits on a document, and save the settings that serve it.

    Hides facts in the document and asks for them once it was read, and looks how far predictions
    of its passages move, beside the full cache. After each part of the document the half that does
    worst drops out. Recommended is what takes the fewest bytes on the device and loses no more than
    --lost. Parts that had no say in the choice check it: there it loses no more than the default
    method with as many bytes. Given again, it goes on.

    Examples:

      kvlite tune report.pdf --minutes 5

      kvlite ask report.pdf "Who paid?" --profile tuned

      kvlite tune report.pdf --method spans --method kvzip --budget 5% --recall 128 --save report
    """
    require_files([file], settings)
    profiles = Profiles(config_folder())
    profiles.path(save, "--save")  # which refuses what is no name
    if not force and save != TUNE_PROFILE:
        profiles.require_new(save)
    require_writable(config_folder())
    from kvlite.bench.tune import Tune
    from kvlite.cli.bench.run import run

    task = Tune(file=file, **options)
    found = task.advice(run(task, settings, out, as_json, 60 * minutes))
    if found is None:
        console().print("Nothing was measured yet: give it more --minutes")
        raise typer.Exit(1)
    model = {} if settings.model == EMBEDDED_MODEL else {"model": lasting_name(settings.model)}
    saved = profiles.save(save, {**model, **found.values}, force=True, note=found.reason)
    if not as_json:
        screen = output()
        screen.print(found.reason)
        screen.print(shlex.join(as_flags(found.values)))
        say(f"Saved in {saved.path}\nUse it with --profile {save}")
