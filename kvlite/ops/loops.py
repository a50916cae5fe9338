"""What loops that numba compiles are for."""

from enum import Enum


class Loops(Enum):
    """What loops are for."""

    PACKED = "packed weights, and a token's way through layers that have them"
    STEP = "attention of a token to exact entries"
    CODES = "attention of a token to quantized entries"
    RECALL = "fetching entries back from the host store, in one call with attention"
    CODES_BACK = "likewise, of quantized ones"
    RECALL_ALONE = "fetching entries back to layers that are too large for one call"
