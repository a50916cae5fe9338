"""The first start on a machine with a card: three models that fit it are proposed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import Console

from kvlite.cli.pull import pulled
from kvlite.cli.screen import at_terminal, stop_on_interrupt
from kvlite.config.paths import SUFFIX, config_folder, data_folder
from kvlite.config.profiles import DEFAULT, Profiles
from kvlite.config.resolve import Origin, Resolved
from kvlite.config.units import readable
from kvlite.memory.nvml import cards

if TYPE_CHECKING:
    from kvlite.planner.fitting import Proposal

_COUNT = 3


def with_first_model(resolved: Resolved, screen: Console, files: Sequence[str] = ()) -> Resolved:
    """Settings with a model that fits the card, if nobody chose one, nor a saved conversation among
    the `files` to open, this machine has a card, and somebody at the terminal takes one of those
    that are proposed: it is downloaded, and the model of the profile `default` from then on. That
    is asked once. Raises KvliteError if the model could not be downloaded, and Stopped by Ctrl-C;
    it is asked again the next time."""
    asked = data_folder() / "models-proposed"
    chosen = resolved.origins["model"].kind != "default"
    if chosen or any(each.lower().endswith(SUFFIX) for each in files):
        return resolved
    heard = at_terminal() and screen.is_terminal and not screen.quiet
    if not heard or asked.exists() or not cards():
        return resolved
    found = _proposed(resolved, screen)
    if not found:
        return resolved
    settings = resolved.settings
    screen.print(
        f"No model was chosen, and {settings.model} is a small one. With texts of "
        f"{found[0].plan.tokens:,} tokens these fit on {found[0].plan.room.name}:"
    )
    for number, each in enumerate(found, 1):
        screen.print(
            f"  {number}. {each.name}: {readable(each.nbytes)} to download, "
            f"{readable(each.plan.peak_bytes)} in use"
        )
    number = _number(len(found), screen)
    name = found[number - 1].name if number else settings.model
    if number:
        pulled(settings, name, found[0].plan.tokens, screen)
    asked.parent.mkdir(parents=True, exist_ok=True)
    asked.touch()
    if not number:
        screen.print("`kvlite pull` gets one later.", style="dim")
        return resolved
    return _with_model(resolved, name, screen)


def _number(count: int, screen: Console) -> int:
    from rich.prompt import IntPrompt

    question = f"Download one (1 to {count}; 0 goes on without)?"
    choices = [*map(str, range(count + 1))]
    try:
        return IntPrompt.ask(
            question, console=screen, choices=choices, show_choices=False, default=0
        )
    except EOFError:
        return 0


def _proposed(resolved: Resolved, screen: Console) -> "list[Proposal]":
    """The largest that fit; none where torch cannot use the card."""
    from kvlite.planner.fitting import proposals

    with stop_on_interrupt() as cancel, screen.status("Looking which models fit this machine"):
        found = list(islice(proposals(resolved.settings, cancel), _COUNT))
    return [each for each in found if each.plan.room.kind == "cuda"]


def _with_model(resolved: Resolved, name: str, screen: Console) -> Resolved:
    """Settings with a model, which is kept in the profile `default` unless another is in use."""
    profile = resolved.profile
    if profile is None or profile.name == DEFAULT:
        values = {} if profile is None else profile.values
        profile = Profiles(config_folder()).save(DEFAULT, {**values, "model": name}, force=True)
        screen.print(f"{name} is used from now on ({profile.path}).", style="dim")
    origins = {**resolved.origins, "model": Origin("profile", profile.name, profile.path)}
    return replace(resolved, settings=resolved.settings.replace({"model": name}), origins=origins)
