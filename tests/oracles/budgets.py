"""How many entries each layer keeps, per KV head. Lists of integers, one per layer, bottom first.

Every number INCLUDES the observation window. All arithmetic on real lines is done in exact
fractions, so that a tie between two layers is a tie and not a matter of float noise.

Letters as in the papers: L layers, n prompt length, W window, C the average per layer including the
window, b = C - W what is chosen from the first n - W positions.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal


def _exact(value: float | Fraction) -> Fraction:
    """A fraction as it is; a float as the simple fraction it was meant to be (0.1 -> 1/10)."""
    if isinstance(value, Fraction):
        return value
    return Fraction(value).limit_denominator(10**6)


def _clamp_keeping_the_sum(
    ideal: Sequence[Fraction], total: int, low: int, high: int
) -> list[Fraction]:
    """Shift all layers alike and clamp them to [low, high], so that they sum to `total`.

    The difference to the total is spread evenly over the layers that are still free. Those pushed
    out of [low, high] are set to the bound and leave the game, and what that adds or removes is
    spread over the rest, and so on. When layers fall out on both sides only the side with the
    larger overshoot is settled in this round: the next shift goes against it, and may bring the
    others back in.
    """
    values = list(ideal)
    free = list(range(len(ideal)))
    while free:
        settled = sum(values[layer] for layer in range(len(values)) if layer not in free)
        shift = (total - settled - sum(ideal[layer] for layer in free)) / Fraction(len(free))
        for layer in free:
            values[layer] = ideal[layer] + shift
        too_low = [layer for layer in free if values[layer] < low]
        too_high = [layer for layer in free if values[layer] > high]
        if not too_low and not too_high:
            break
        missing = sum(low - values[layer] for layer in too_low)
        excess = sum(values[layer] - high for layer in too_high)
        if missing >= excess:
            for layer in too_low:
                values[layer] = Fraction(low)
                free.remove(layer)
        if excess >= missing:
            for layer in too_high:
                values[layer] = Fraction(high)
                free.remove(layer)
    return values


def largest_remainder(
    ideal: Sequence[float | Fraction], total: int, low: int, high: int
) -> list[int]:
    """Integers close to `ideal`, each in [low, high], whose sum is min(total, len(ideal) * high).

    Largest-remainder rule: every layer gets the floor of its ideal, the entries left over go one
    each to the largest fractional parts, ties to the lower layer. Where a bound binds, the clamped
    difference is spread evenly over the unclamped layers before rounding (the bounds are integers,
    so rounding cannot leave them again).

    Source: kvlite's rule, no paper states one ("PyramidKV", section 4.2.1, leaves k^l real).
    """
    low = min(low, high)
    total = min(total, len(ideal) * high)
    if total < len(ideal) * low:
        raise ValueError(f"{len(ideal)} layers of at least {low} do not fit a total of {total}")
    values = _clamp_keeping_the_sum([_exact(value) for value in ideal], total, low, high)
    floors = [value.numerator // value.denominator for value in values]
    remainders = [value - floor for value, floor in zip(values, floors, strict=True)]
    left_over = total - sum(floors)
    by_remainder = sorted(range(len(values)), key=lambda layer: (-remainders[layer], layer))
    for layer in by_remainder[:left_over]:
        floors[layer] += 1
    return floors


def uniform(average: int, layers: int) -> list[int]:
    """The same for every layer, as SnapKV and StreamingLLM do."""
    return [average] * layers


def pyramid(
    average: int,
    window: int,
    layers: int,
    n: int,
    beta: float = 20,
    rounding: Literal["exact", "official"] = "exact",
    short: Literal["uniform", "reflect"] = "uniform",
    floor: int = 1,
) -> list[int]:
    """PyramidKV: an arithmetic sequence, large at the bottom.

    Source: "PyramidKV", section 4.2.1, Eq. 1. With T = L * b the total beyond the window:
    k_top = T / (beta L) = b / beta, k_0 = 2 T / L - k_top = 2b - b / beta, linear in between.

    What the paper leaves open is as in the released code:
      - n < C: every layer keeps all n.
      - C <= n < 2b: every layer keeps C. `short="reflect"` goes on to the line instead.
      - Otherwise the line. Where its bottom reaches n - W it is capped there, and the top becomes
        2b minus that bottom, which keeps the sum.
    One layer has no line and keeps C.

    `rounding="exact"`: real line, then largest remainders; sum = L * C. At least `floor` (>= 1)
    and at most n - W per layer beyond the window.
    `rounding="official"`: the released code's integers, b // beta and (mx - mn) // (L - 1). They
    spend more than T. `floor` plays no part.

    `window=0` is allowed, for `kvx_lines`.
    """
    if not average > window >= 0:
        raise ValueError(f"the average {average} must exceed the window {window}")
    if beta < 1:
        raise ValueError(f"beta must be at least 1, not {beta}: the pyramid would be inverted")
    if rounding not in ("exact", "official") or short not in ("uniform", "reflect"):
        raise ValueError(f"unknown rounding {rounding!r} or short {short!r}")

    chosen = average - window
    room = n - window
    if n < average:
        return [n] * layers
    if n < 2 * chosen and short == "uniform":
        return uniform(average, layers)
    if layers == 1:
        return [average]

    if rounding == "official":
        top = int(chosen // beta)
        bottom = 2 * chosen - top
        if bottom >= room:
            bottom = room
            top = 2 * chosen - bottom
        step = (bottom - top) // (layers - 1)
        return [bottom - layer * step + window for layer in range(layers)]

    real_top = chosen / _exact(beta)
    real_bottom = 2 * chosen - real_top
    if real_bottom >= room:
        real_bottom = Fraction(room)
        real_top = 2 * chosen - real_bottom
    ideal = [
        real_bottom - (real_bottom - real_top) * layer / (layers - 1) for layer in range(layers)
    ]
    counts = largest_remainder(ideal, layers * chosen, max(1, floor), room)
    return [count + window for count in counts]


def kvx_lines(average: int, layers: int, n: int, beta: float = 20) -> list[int]:
    """KV-X: the cache line capacities C_l.

    Source: "KV-X", section 3.1, Eq. 1 and 2: an arithmetic progression from C_1 down to C_L with
    the sum C_total. The paper gives no C_1 and C_L; kvlite takes PyramidKV's ends,
    C_L = avg / beta and C_1 = 2 avg - C_L. So it is PyramidKV's line without a window, with the
    same rules for short prompts.
    """
    return pyramid(average, 0, layers, n, beta=beta, rounding="exact")


def falling_line(
    average: int, layers: int, n: int, beside: int, beta: float, squared: bool, least: int
) -> list[int]:
    """Layer budgets that fall by one factor from layer to layer, its ends 2 beta - 1 to 1, or the
    square of that. No paper prints it: "PyramidKV", Table 4, names such lines without a formula."""
    if n <= average or layers == 1:
        return [average] * layers
    ends = (2 * beta - 1) ** (2 if squared else 1)
    weights = [ends ** (-layer / (layers - 1)) for layer in range(layers)]
    chosen = average - beside
    ideal = [Fraction(chosen * layers * weight / sum(weights)) for weight in weights]
    counts = largest_remainder(ideal, chosen * layers, min(least, chosen), n - beside)
    return [count + beside for count in counts]
