"""`kvlite profile`: settings kept under a name."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvlite.cli.console import say
from kvlite.cli.options import with_flags
from kvlite.config.paths import config_folder
from kvlite.config.profiles import DEFAULT, Profiles
from kvlite.config.settings import Settings, flag_of
from kvlite.errors import SettingError
from kvlite.model.source import lasting_name

app = typer.Typer(
    no_args_is_help=True,
    help="Keep settings under a name, and use them with --profile NAME.\n\n"
    f"A profile called {DEFAULT} is used where none is named. Profiles are TOML files in kvlite's "
    "configuration folder (`kvlite config` says where): list, edit and delete them there.",
    epilog='Try: kvlite profile save mine --kv-bits 8 ; kvlite ask report.pdf "Who?" '
    "--profile mine",
)

_Name = Annotated[str, typer.Argument(help="letters, digits, - and _")]


@app.command()
@with_flags
def save(
    given: Mapping[str, Any],
    name: _Name,
    force: Annotated[
        bool, typer.Option("--force", help="overwrite a profile of the same name")
    ] = False,
) -> None:
    """Save the settings given here, and no others, as a profile.

    A flag, the environment or the default decides the others. A model's path is saved as an
    absolute path, so that it is found from any folder.

    Examples:

      kvlite profile save mine --model ./Qwen3-8B --kv-bits 8 --recall ram

      kvlite profile save default --budget 25% --force

      kvlite ask report.pdf "Who paid?" --profile mine
    """
    if not given:
        raise SettingError("there is nothing to save: give settings, such as --kv-bits 8")
    settings = Settings().replace(given)
    from kvlite.methods.engine_config import require_meaning

    values = {each: getattr(settings, each) for each in given}
    for each, value in values.items():
        require_meaning(each, value, flag_of(each))
    if "model" in values:
        values["model"] = lasting_name(values["model"])
    saved = Profiles(config_folder()).save(name, values, force=force)
    use = "It is used where none is named." if name == DEFAULT else f"Use it with --profile {name}"
    say(f"Saved in {saved.path}\n{use}")
