"""Typer options made from `Settings`, so that each is described once."""

import inspect
import json
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from typing import Annotated, Any, get_type_hints

import typer

from kvlite.config.paths import config_folder
from kvlite.config.profiles import Profiles
from kvlite.config.resolve import Resolved, resolve
from kvlite.config.settings import OPTIONS, Settings, flag_of
from kvlite.errors import KvliteError

_HINTS = get_type_hints(Settings)
_CONTEXT, _PROFILE = "typer_context", "profile"
Command = Callable[..., None]


def with_settings(command: Command, names: Collection[str] = OPTIONS) -> Command:
    """As `with_resolved`, for a first parameter that is `settings`."""

    @wraps(command)
    def plain(resolved: Resolved, **values: Any) -> None:
        command(resolved.settings, **values)

    return with_resolved(plain, names)


def with_resolved(command: Command, names: Collection[str] = OPTIONS) -> Command:
    """Give a command, whose first parameter is `Resolved`, a flag for each of these settings, and
    --profile; what no flag says comes from the environment, a profile, or is the default. Errors
    that end it say where."""

    @wraps(command)
    def told(resolved: Resolved, **values: Any) -> None:
        from kvlite.methods.engine_config import require_meanings

        origins = resolved.origins
        try:
            require_meanings(
                resolved.settings,
                lambda name: origins[name].called(name) if name in origins else flag_of(name),
            )
            command(resolved, **values)
        except KvliteError as error:
            resolved.noted(error)
            raise

    return _with_flags(told, names, partial(_resolved, names=names), _profile())


# For commands that open a model, and have ways of their own to say what is done with it.
with_model = partial(with_settings, names=("model", "device", "weights"))


def with_origins(command: Command) -> Command:
    """As `with_resolved`, for a command that shows values and needs none to mean anything."""
    return _with_flags(command, OPTIONS, partial(_resolved, names=OPTIONS), _profile())


def with_given(command: Command) -> Command:
    """Give a command a flag for every setting, whose first parameter is those that were given and
    nothing else, by name."""
    return _with_flags(command, OPTIONS, lambda flags, _: flags)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Settings' values as they would be given on the command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else _negated(flag))
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [flag, str(each)]
    return words


def as_text(value: Any) -> str:
    """A setting's value for a table."""
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _with_flags(
    command: Command,
    names: Collection[str],
    first: Callable[[Mapping[str, Any], str | None], Any],
    *more: inspect.Parameter,
) -> Command:
    """A command without its first parameter, which `first` makes of the flags given and the name
    of a profile."""
    own = list(inspect.signature(command).parameters.values())[1:]
    options = [_parameter(name) for name in names]

    def run(**values: Any) -> None:
        context: typer.Context = values.pop(_CONTEXT)
        given = {name: values.pop(name) for name in names}
        flags = {name: value for name, value in given.items() if _is_given(context, name)}
        command(first(flags, values.pop(_PROFILE, None)), **values)

    parameters = [*own, *options, *more, _keyword(_CONTEXT, typer.Context)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _resolved(flags: Mapping[str, Any], profile: str | None, names: Collection[str]) -> Resolved:
    chosen = Profiles(config_folder()).chosen(profile, os.environ)
    return resolve(flags, os.environ, chosen, names)


def _negated(flag: str) -> str:
    return f"--no-{flag[2:]}"


def _keyword(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _profile() -> inspect.Parameter:
    shown = typer.Option(
        "--profile",
        metavar="NAME",
        help="settings saved by `kvlite profile save`, for those that neither a flag nor the "
        "environment sets; left out, KVLITE_PROFILE, else the profile called default if there is "
        "one; none for no profile",
        rich_help_panel=OPTIONS["model"].metadata["panel"],
    )
    return _keyword(_PROFILE, Annotated[str | None, shown], None)


def _parameter(name: str) -> inspect.Parameter:
    option = OPTIONS[name]
    about, flag = option.metadata, flag_of(name)
    default: Any = option.default
    several = isinstance(default, tuple)
    help = about["help"]
    if about["choices"]:
        help += f" ({'|'.join(about['choices'])})"
    # What a profile sets to true, the command line can set back.
    declared = f"{flag}/{_negated(flag)}" if option.type is bool else flag
    shown = typer.Option(declared, help=help, rich_help_panel=about["panel"])
    return _keyword(
        name,
        Annotated[list[str] if several else _HINTS[name], shown],
        list(default) if several else default,
    )
