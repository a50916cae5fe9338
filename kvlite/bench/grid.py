"""What a grid is made of: methods and budgets, with the yardstick and the control always in it."""

from collections.abc import Iterable, Sequence
from itertools import product

from kvlite.errors import SettingError
from kvlite.methods import Method, parse_method
from kvlite.methods.full import Full
from kvlite.methods.random import Random
from kvlite.model.load import LoadedModel


def choices(specs: Sequence[str], budgets: Sequence[int], longest: int) -> list[tuple[Method, int]]:
    """Every method with every budget; `full` first and `random` last, if not named.

    Args:
        budgets: mean entries a KV head and layer.
        longest: tokens of the longest prompt, the budget of methods that free nothing.

    Raises:
        SettingError: a method is none, or a budget is too small for it.
    """
    methods = [parse_method(spec) for spec in specs]
    named = {method.name for method in methods}
    if Full.name not in named:
        methods.insert(0, Full())
    if Random.name not in named:
        methods.append(Random(window=min(Random().window, max(1, min(budgets) // 2))))
    grid = []
    for method in methods:
        # A method that frees nothing is the same at every budget.
        sizes = budgets if method.frees_memory else [longest]
        grid += list(product([method], sizes))
    for method, size in grid:
        method.check(size)
    return list(dict.fromkeys(grid))


def fitted(choices: Sequence[tuple[Method, int]], model: LoadedModel) -> list[tuple[Method, int]]:
    """The methods for one model.

    Raises:
        SettingError: one needs a calibration of it, and there is none.
    """
    return [(each.fitted(model.shape, model.calibration), budget) for each, budget in choices]


def evenly(count: int) -> list[float]:
    """Depths from 0 to 1."""
    return [index / max(1, count - 1) for index in range(count)]


def require_known(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises SettingError naming the first value that there is not."""
    offered = list(known)
    for each in given:
        if each not in offered:
            raise SettingError(f"{flag} {each!r} is not one of {', '.join(offered)}")


def require_room(longest: int, extra: int, held: int, trained: int) -> None:
    """Raises SettingError if prompts are longer than the text or the model.

    Args:
        longest: tokens of the longest prompt.
        extra: tokens of an answer.
        held: tokens of the text.
        trained: tokens the model was trained for.
    """
    limit = min(held, trained - extra)
    if longest > limit:
        raise SettingError(
            f"--tokens {longest} is too long: give up to {limit} (the text has {held:,} tokens, "
            f"the model was trained for {trained:,})"
        )
