"""How many entries each layer keeps: integers that sum exactly to what was asked for."""

from collections.abc import Sequence
from math import floor
from typing import Literal

Rounding = Literal["exact", "official"]
Short = Literal["uniform", "reflect"]
LayerLine = Literal[
    "uniform", "pyramid", "geometric", "exponential", "rank", "entropy", "gini", "global"
]
BY_SCORES: tuple[LayerLine, ...] = ("entropy", "gini", "global")


def largest_remainder(ideal: Sequence[float], total: int, low: int, high: int) -> list[int]:
    """Round `ideal` entries of each layer to integers within `low .. high` that sum to `total`, or
    to the nearest sum that these limits allow.

    The leftovers of rounding down go to the largest fractions, ties to the lower layer; what
    clamping adds or takes is shared out over the layers that are not clamped.
    """
    layers = len(ideal)
    total = max(layers * low, min(total, layers * high))
    free = list(range(layers))
    fixed: dict[int, int] = {}
    while True:
        spare = total - sum(fixed.values())
        shift = (spare - sum(ideal[i] for i in free)) / len(free) if free else 0.0
        wanted = {i: ideal[i] + shift for i in free}
        over = [i for i in free if wanted[i] > high]
        under = [i for i in free if wanted[i] < low]
        if not over and not under:
            break
        # Clamping one side at a time, the heavier first, never has to be undone.
        excess = sum(wanted[i] - high for i in over)
        lack = sum(low - wanted[i] for i in under)
        for i in over if excess >= lack else under:
            fixed[i] = high if excess >= lack else low
        free = [i for i in free if i not in fixed]
    whole = {i: floor(wanted[i] + 1e-9) for i in free}
    left = total - sum(fixed.values()) - sum(whole.values())
    by_fraction = sorted(free, key=lambda i: (-round(wanted[i] - whole[i], 9), i))
    for i in by_fraction[:left]:
        whole[i] += 1
    return [fixed[i] if i in fixed else whole[i] for i in range(layers)]


def pyramid(
    average: int,
    layers: int,
    seen: int,
    *,
    window: int,
    beta: float,
    rounding: Rounding = "exact",
    short: Short = "uniform",
    least: int = 1,
) -> list[int]:
    """Arithmetically falling budgets: much for the first layer, little for the last.

    Source: "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
    section 4.2.1, Eq. 1, and its official code for the cap at the prompt's length and for
    prompts under twice the budget.

    Args:
        average: mean entries a layer, the window included.
        seen: tokens to choose from.
        window: entries that every layer keeps beside the line; 0 for a line alone (KV-X).
        beta: the last layer's share of the mean is 1 / beta; 1 is uniform.
        rounding: "exact" sums to `average * layers`; "official" rounds the step down as the
            released code does, which spends more than was asked for.
        short: prompts under `2 * (average - window)` get uniform budgets, or the same line
            reflected at the prompt's length.
        least: entries of the line that every layer gets.

    Returns:
        Entries of each layer, the window included.
    """
    chosen, available = average - window, seen - window
    if chosen >= available:
        return [seen] * layers
    if layers == 1 or (short == "uniform" and seen < 2 * chosen):
        return [average] * layers
    if rounding == "official":
        bottom = int(chosen // beta)
        top = 2 * chosen - bottom
        if top >= available:
            top, bottom = available, 2 * chosen - available
        step = (top - bottom) // (layers - 1)
        return [top - step * layer + window for layer in range(layers)]
    low = chosen / beta
    high = 2 * chosen - low
    if high > available:
        high, low = float(available), float(2 * chosen - available)
    line = [high - (high - low) * layer / (layers - 1) for layer in range(layers)]
    rounded = largest_remainder(line, chosen * layers, min(least, chosen), available)
    return [entries + window for entries in rounded]


def layer_line(
    kind: LayerLine,
    average: int,
    layers: int,
    seen: int,
    *,
    reserved: int,
    beta: float,
    least: int = 1,
) -> list[int]:
    """Budgets on a line over layers; uniform for prompts within the budget, and for the kinds that
    layers share out by their scores once all are read.

    "pyramid" is `pyramid`'s. "geometric" falls by the same factor from layer to layer, between ends
    in the pyramid's proportion, 2 beta - 1 to 1; "exponential" by that factor's square, so that the
    first layers get nearly all. PyramidKV, section 6.5 (Table 4), compares such lines and gives no
    formulas; these are ours.

    Args:
        average, seen, beta, least: as for `pyramid`.
        reserved: entries that every layer keeps beside the line.
    """
    if seen <= average or layers == 1 or kind == "uniform" or kind in BY_SCORES:
        return [average] * layers
    if kind == "pyramid":
        return pyramid(average, layers, seen, window=reserved, beta=beta, least=least)
    steepness = 1 if kind == "geometric" else 2
    factor = (2 * beta - 1) ** (-steepness / (layers - 1))
    falling = [factor**layer for layer in range(layers)]
    chosen = average - reserved
    line = [chosen * layers * share / sum(falling) for share in falling]
    rounded = largest_remainder(line, chosen * layers, min(least, chosen), seen - reserved)
    return [entries + reserved for entries in rounded]


def by_groups(
    groups: Sequence[int],
    average: int,
    seen: int,
    *,
    reserved: int,
    beta: float,
    least: int = 1,
) -> list[int]:
    """Budgets that fall evenly from the first group of layers to the last; layers of a group get
    the same, but for rounding.

    Source: "UNComp: Can Matrix Entropy Uncover Sparsity?", section 3.3, Eq. 12 and 13, whose line
    is given by its ends; here the last group's is 1 / beta of the mean, as `pyramid`'s, and the
    first's makes up the mean.

    Args:
        groups: the group of each layer, rising from 0.
        average, seen, reserved, beta, least: as for `layer_line`.
    """
    if seen <= average or not max(groups):
        return [average] * len(groups)
    chosen, layers = average - reserved, len(groups)
    low = chosen / beta
    falls = [group / max(groups) for group in groups]
    fall = sum(falls) / layers
    high = (chosen - fall * low) / (1 - fall)
    line = [high - (high - low) * each for each in falls]
    rounded = largest_remainder(line, chosen * layers, min(least, chosen), seen - reserved)
    return [entries + reserved for entries in rounded]


def filled(budgets: Sequence[int], held: Sequence[int]) -> list[int]:
    """The same budgets, except that a layer that holds less than its budget lends the rest, evenly,
    to layers that hold more than theirs; what nobody can take stays."""
    given = list(budgets)
    spare = sum(max(0, budget - most) for budget, most in zip(budgets, held, strict=True))
    taken = 0
    while spare > taken:
        open_layers = [i for i, most in enumerate(held) if given[i] < most]
        if not open_layers:
            break
        share = max(1, (spare - taken) // len(open_layers))
        for i in open_layers:
            more = min(share, held[i] - given[i], spare - taken)
            given[i] += more
            taken += more
    for i, most in enumerate(held):
        lent = min(taken, max(0, budgets[i] - most))
        given[i] -= lent
        taken -= lent
    return given
