"""Two layers' vectors merged in depth, one token at a time.

Source: "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models", section 4:
directions by spherical interpolation, magnitudes apart, tokens of the largest angular distance
retained. Shapes, one head of one sequence: `(n, d)`.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from .attention import FloatArray


def unit(vector: FloatArray) -> FloatArray:
    length = math.sqrt(math.fsum(float(x) ** 2 for x in vector))
    return vector / max(length, 1e-6)


def direction(lower: FloatArray, upper: FloatArray, t: float) -> tuple[FloatArray, float]:
    """The direction that two vectors share, and their angle; t is the upper one's weight."""
    one, two = unit(lower), unit(upper)
    cosine = math.fsum(float(a) * float(b) for a, b in zip(one, two, strict=True))
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    if math.sin(angle) <= 1e-6:
        return unit((1 - t) * one + t * two), angle
    near = math.sin((1 - t) * angle) / math.sin(angle)
    far = math.sin(t * angle) / math.sin(angle)
    return unit(near * one + far * two), angle


def merged(
    lower: ArrayLike, upper: ArrayLike, t: float, retain: int
) -> tuple[FloatArray, FloatArray, list[int]]:
    """What is restored of each layer, and which tokens are retained as they were.

    Args:
        retain: how many tokens stay; ties go to the earlier one.
    """
    below, above = (np.array(each, dtype=np.float64) for each in (lower, upper))
    shared = [direction(a, b, t) for a, b in zip(below, above, strict=True)]
    by_angle = sorted(range(len(shared)), key=lambda token: (-shared[token][1], token))
    kept = sorted(by_angle[:retain])
    restored = below.copy(), above.copy()
    for token, (towards, _) in enumerate(shared):
        if token in kept:
            continue
        for layer, exact in zip(restored, (below, above), strict=True):
            layer[token] = towards * math.sqrt(math.fsum(float(x) ** 2 for x in exact[token]))
    return (*restored, kept)
