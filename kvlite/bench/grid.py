"""What a grid is made of: methods and budgets, with the yardstick and the control always in it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from kvlite.cache import parse_kv_bits
from kvlite.cache.bits import UNCHANGED
from kvlite.engine.fork import Choice
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.full import Full
from kvlite.methods.random import Random
from kvlite.model.load import LoadedModel


def choices(
    specs: Sequence[str], budgets: Sequence[int], longest: int, kv_bits: Sequence[str] = ("16",)
) -> list[Choice]:
    """Every method with every budget and width; `full` first and `random` last, if not named, and
    `full` unquantized in any case.

    Args:
        budgets: mean entries a KV head and layer.
        longest: tokens of the longest prompt, the budget of methods that free nothing.
        kv_bits: as for `kvlite ask`.

    Raises:
        SettingError: a method or a width is none, or a budget is too small for it.
    """
    methods = [parse_method(spec) for spec in specs]
    named = {method.name for method in methods}
    if Full.name not in named:
        methods.insert(0, Full())
    if Random.name not in named:
        methods.append(Random(window=min(Random().window, max(1, min(budgets) // 2))))
    widths = [parse_kv_bits(each) for each in kv_bits]
    grid = [Choice(Full(), longest)]
    for method in methods:
        # A method that frees nothing is the same at every budget.
        sizes = budgets if method.frees_memory else [longest]
        # The control is one of methods, not of widths.
        own = widths if method.name != Random.name or method.name in named else [None]
        grid += [Choice(method, size, width) for size, width in product(sizes, own)]
    for choice in grid:
        choice.method.check(choice.budget)
    return list(dict.fromkeys(grid))


def fitted(choices: Sequence[Choice], model: LoadedModel) -> list[Choice]:
    """The methods for one model.

    Raises:
        SettingError: one needs a calibration of it, and there is none.
    """
    return [
        replace(each, method=each.method.fitted(model.shape, model.calibration)) for each in choices
    ]


def label(method: str, kv_bits: str) -> str:
    """A method and its width, as tables and plots name them."""
    return method if kv_bits == UNCHANGED else f"{method}, {kv_bits} bits"


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
