"""`kvlite profile`: settings kept under a name."""

import shlex
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvlite.cli.console import print_json, say
from kvlite.cli.options import AsJson, as_flags, with_flags
from kvlite.cli.screen import console
from kvlite.config.paths import config_folder
from kvlite.config.profiles import DEFAULT, Profile, Profiles
from kvlite.config.settings import Settings, flag_of
from kvlite.errors import SettingError
from kvlite.model.source import lasting_name

app = typer.Typer(
    no_args_is_help=True,
    help="Keep settings under a name, and use them with --profile NAME.\n\n"
    f"A profile called {DEFAULT} is used where none is named. Profiles are TOML files in kvlite's "
    "configuration folder (`kvlite config` says where), and may be edited.",
    epilog='Try: kvlite profile save mine --kv-bits 8 ; kvlite ask report.pdf "Who?" '
    "--profile mine",
)

_Name = Annotated[str, typer.Argument(help="letters, digits, - and _")]


@app.command("list")
def listing(as_json: AsJson = False) -> None:
    """List the profiles there are, and what they set.

    Examples:

      kvlite profile list

      kvlite profile list --json
    """
    profiles = Profiles(config_folder())
    good, broken = list[Profile](), dict[str, str]()
    for name in profiles.names():
        try:
            good.append(profiles.read(name))
        except SettingError as error:
            broken[str(profiles.path(name))] = str(error)
    if as_json:
        rows = [profile.to_json() for profile in good]
        print_json({"folder": str(profiles.folder), "profiles": rows, "broken": broken})
        return
    if not good and not broken:
        say(
            f"There is no profile in {profiles.folder} yet: kvlite profile save NAME --kv-bits 8 "
            "makes one"
        )
    for profile in good:
        say(f"{profile.name}: {shlex.join(as_flags(profile.values))}")
    for flaw in broken.values():
        console().print(f"Note: {flaw}", style="yellow")


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


@app.command()
def delete(name: _Name) -> None:
    """Delete a profile.

    Example:

      kvlite profile delete mine
    """
    say(f"Deleted {Profiles(config_folder()).delete(name)}")
