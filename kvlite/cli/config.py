"""`kvlite config`: the settings in use, and where each comes from."""

import json
import os
from typing import Any

from rich.table import Column, Table

from kvlite.cli.console import output, print_json
from kvlite.cli.options import AsJson, with_resolved
from kvlite.config.environment import unknown_variables
from kvlite.config.paths import cache_folder, config_folder, data_folder
from kvlite.config.resolve import Resolved


@with_resolved
def config(
    resolved: Resolved,
    as_json: AsJson = False,
) -> None:
    """Show each setting's value and where it comes from, and kvlite's folders.

    A flag goes before the environment (KVLITE_KV_BITS for --kv-bits, KVLITE_MAX_NEW_TOKENS for
    --max-tokens, as the first column has them), the environment before a profile, a profile before
    the default.

    Examples:

      kvlite config

      kvlite config --profile mine --temperature 0.7

      KVLITE_KV_BITS=8 kvlite config --json
    """
    folders = {"config": config_folder(), "cache": cache_folder(), "data": data_folder()}
    if as_json:
        plain: dict[str, Any] = {
            "settings": {
                name: {"value": getattr(resolved.settings, name), **origin.to_json()}
                for name, origin in resolved.origins.items()
            },
            "profile": None if resolved.profile is None else resolved.profile.to_json(),
            "folders": {name: str(path) for name, path in folders.items()},
            "unknown_variables": unknown_variables(os.environ),
        }
        print_json(plain)
        return
    table = Table("setting", Column("value", overflow="fold"), Column("from", overflow="fold"))
    for name, origin in resolved.origins.items():
        value = _text(getattr(resolved.settings, name))
        style = "dim" if origin.kind == "default" else ""
        table.add_row(name, value, str(origin), style=style)
    places = Table("folder", Column("path", overflow="fold"))
    for name, path in folders.items():
        places.add_row(name, str(path))
    screen = output()
    screen.print(table)
    screen.print(places)
    if resolved.profile is not None:
        screen.print(f"Profile: {resolved.profile.name} ({resolved.profile.path})")


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
