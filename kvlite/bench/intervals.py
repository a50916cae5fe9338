"""How sure a figure from few prompts is: 95% intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev

_NORMAL = 1.959964
# Student's t at 97.5% for 1 to 30 degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval; `low` and `high` are None if one value says nothing of it."""

    value: float
    low: float | None
    high: float | None

    def shown(self, decimals: int = 2) -> str:
        """`0.56 (0.27 to 0.81)`."""
        value = f"{self.value:.{decimals}f}"
        if self.low is None or self.high is None:
            return value
        return f"{value} ({self.low:.{decimals}f} to {self.high:.{decimals}f})"


def share_of(hits: int, asked: int) -> Estimate:
    """A share of hits, with Wilson's score interval.

    Source: "Probable Inference, the Law of Succession, and Statistical Inference", E. B. Wilson.
    """
    square = _NORMAL**2
    share = hits / asked
    center = (share + square / (2 * asked)) / (1 + square / asked)
    half = sqrt(share * (1 - share) / asked + square / (4 * asked**2)) * _NORMAL
    half /= 1 + square / asked
    return Estimate(share, max(0.0, center - half), min(1.0, center + half))


def mean_of(values: Sequence[float], least: float = -inf, most: float = inf) -> Estimate:
    """A mean, with Student's t interval within what the values can be.

    Args:
        least, most: the values' bounds.
    """
    mean, count = fmean(values), len(values)
    if count == 1:
        return Estimate(mean, None, None)
    half = _student(count - 1) * stdev(values) / sqrt(count)
    return Estimate(mean, max(least, mean - half), min(most, mean + half))


def _student(freedom: int) -> float:
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    return _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
