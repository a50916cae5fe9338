"""Typer options made from `Settings`, so that each is described once."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from kvlite.settings import Settings

_HINTS = get_type_hints(Settings)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first parameter is `settings`, one flag for every setting."""
    own = list(inspect.signature(command).parameters.values())[1:]

    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in names if name in given}
        command(Settings(**{**chosen, "stop": tuple(chosen["stop"] or ())}), **given)

    options = [_parameter(option) for option in dataclasses.fields(Settings)]
    names = [option.name for option in options]
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*own, *options]}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _parameter(option: "dataclasses.Field[Any]") -> inspect.Parameter:
    about = option.metadata
    flag = about["flag"] or f"--{option.name.replace('_', '-')}"
    default: Any = option.default
    several = isinstance(default, tuple)
    help = about["help"]
    if about["choices"]:
        help += f" ({'|'.join(about['choices'])})"
    shown = typer.Option(flag, help=help, rich_help_panel=about["panel"])
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) if several else default,
        annotation=Annotated[list[str] if several else _HINTS[option.name], shown],
    )
