"""Typer options made from `Settings`."""

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from kvlite.cli.screen import console
from kvlite.config.environment import about_unknown, unknown_variables
from kvlite.config.paths import config_folder
from kvlite.config.profiles import Profiles
from kvlite.config.resolve import Resolved, resolve
from kvlite.config.settings import OPTIONS, Settings, flag_of
from kvlite.errors import KvliteError, SettingError, reason

_HINTS = get_type_hints(Settings)
_CONTEXT = "typer_context"
Command = Callable[..., None]

AsJson = Annotated[
    bool, typer.Option("--json", help="print JSON, an object a line, instead of text")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print nothing but results")]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="a key that programs must have; may be repeated; KVLITE_API_KEY sets one that no list "
        "of processes shows",
    ),
]

_keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def with_resolved(command: Command, names: Collection[str] = OPTIONS) -> Command:
    """Give a command --profile and flags for settings; its first parameter is `Resolved`. They are
    checked together, and errors that end the command say where a value came from if it was not a
    flag. Variables that look like a setting's and are none are named on standard error."""

    @wraps(command)
    def resolved(given: Mapping[str, Any], profile: str | None, **values: Any) -> None:
        from kvlite.methods.engine_config import require_meanings

        for variable in unknown_variables(os.environ):
            screen = console(quiet=bool(values.get("quiet")))
            screen.print(f"Note: {about_unknown(variable)}", style="yellow")
        chosen = Profiles(config_folder()).chosen(profile, os.environ)
        made = resolve(given, os.environ, chosen, names)
        origins = made.origins
        try:
            require_meanings(
                made.settings,
                lambda name: origins[name].called(name) if name in origins else flag_of(name),
            )
            command(made, **values)
        except KvliteError as error:
            made.noted(error)
            raise

    return with_flags(resolved, names, _profile())


def with_settings(command: Command, names: Collection[str] = OPTIONS) -> Command:
    """As `with_resolved`, for a command whose first parameter is `Settings`."""

    @wraps(command)
    def plain(resolved: Resolved, **values: Any) -> None:
        command(resolved.settings, **values)

    return with_resolved(plain, names)


# For commands that need a model and have options of their own for the rest.
with_model = partial(with_settings, names=("model", "device", "weights"))


def keys_of(given: Sequence[str] | None) -> list[str]:
    """All keys that programs may have: those given, and the environment's."""
    return [*(given or ()), *filter(None, [os.environ.get("KVLITE_API_KEY")])]


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Settings' values as they would be given on the command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [flag, str(each)]
    return words


def with_flags(
    command: Command, names: Collection[str] = OPTIONS, *more: inspect.Parameter
) -> Command:
    """The command with flags, and more parameters, in place of its first parameter, which gets the
    values of the flags that were given. It may have a `typer_context` of its own."""
    own = list(inspect.signature(command).parameters.values())[1:]
    has_context = any(each.name == _CONTEXT for each in own)

    def run(**values: Any) -> None:
        context: typer.Context = values[_CONTEXT] if has_context else values.pop(_CONTEXT)
        given = {}
        for name in names:
            value, source = values.pop(name), context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                given[name] = _contents(value) if name == "schema" else value
        command(given, **values)

    options = [_parameter(name) for name in names]
    parameters = [*own, *options, *more]
    if not has_context:
        parameters.append(_keyword(_CONTEXT, annotation=typer.Context))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def with_fields(options: type) -> Callable[[Command], Command]:
    """Give a command the options that a class declares (`bench.options`), after its first
    parameter. It takes them as `**options`, and has none but keyword parameters besides."""
    hints = get_type_hints(options)
    shown = [_field(each, hints[each.name]) for each in fields(options) if each.metadata]

    def decorate(command: Command) -> Command:
        first, *own = inspect.signature(command).parameters.values()
        own = [each for each in own if each.kind is not each.VAR_KEYWORD]
        command.__signature__ = inspect.Signature([first, *shown, *own])  # type: ignore[attr-defined]
        return command

    return decorate


def _field(field: "Field[Any]", hint: Any) -> inspect.Parameter:
    about = field.metadata
    assert callable(field.default_factory), "fields with a help have a default"
    if about["argument"]:
        shown = typer.Argument(help=about["help"])
    else:
        several = _listed if about["commas"] else _once
        shown = typer.Option(
            about["flag"] or f"--{field.name.replace('_', '-')}",
            help=about["help"],
            min=about["low"],
            callback=several if get_origin(hint) is list else None,
        )
    made = Annotated[hint, shown]
    return _keyword(field.name, annotation=made, default=field.default_factory())


def _once(values: list[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _listed(values: list[str]) -> list[str]:
    return _once([each.strip() for value in values for each in value.split(",")])


def _contents(value: str) -> str:
    if not os.path.isfile(value):
        if re.fullmatch(r'[^\s{}"]*\.[A-Za-z0-9]{1,5}', value):
            raise SettingError(f"--schema {value}: there is no such file")
        return value
    try:
        return Path(value).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"--schema {value} cannot be read ({reason(error)}): give a file in UTF-8"
        ) from error


def _profile() -> inspect.Parameter:
    shown = typer.Option(
        "--profile",
        metavar="NAME",
        help="settings saved by `kvlite profile save`, for those that neither a flag nor the "
        "environment sets; left out, KVLITE_PROFILE, else the profile called default if there is "
        "one; none for no profile",
        rich_help_panel=OPTIONS["model"].metadata["panel"],
    )
    return _keyword("profile", annotation=Annotated[str | None, shown], default=None)


def _parameter(name: str) -> inspect.Parameter:
    option, flag = OPTIONS[name], flag_of(name)
    about, default, hint = option.metadata, option.default, _HINTS[name]
    help = about["help"]
    if about["choices"]:
        help += f" ({', '.join(about['choices'])})"
    if isinstance(default, tuple):
        default, hint = list(default), list[str]
    if option.type is bool:
        flag = f"{flag}/--no-{flag[2:]}"  # the command line can undo what a profile sets
    shown = typer.Option(flag, help=help, rich_help_panel=about["panel"])
    return _keyword(name, annotation=Annotated[hint, shown], default=default)
