"""Blocks of packed weights as GGUF files have them: which formats there are, and their sizes.

A block has the weights of 32 or 256 inputs of one output: codes of 4 to 8 bits, some with their
high bits apart, and scales. A weight is `code * scale + offset`; 32 inputs share both (16 in Q6_K).
Source: ggml's ggml-common.h and, for what bytes mean, the gguf package's quants.py.
"""

from dataclasses import dataclass

GROUP = 32
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = 2, 3, 6, 7, 8, 12, 13, 14


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks.

    Attributes:
        name, number: ggml's.
        inputs: weights of a block.
        nbytes: bytes of a block.
        high_bits: bits of a code that lie apart from its low 4.
        has_least: whether offsets are stored, too.
    """

    name: str
    number: int
    inputs: int
    nbytes: int
    high_bits: int = 0
    has_least: bool = False


FORMATS = {
    made.name: made
    for made in (
        BlockFormat("Q4_0", Q4_0, 32, 18),
        BlockFormat("Q4_1", Q4_1, 32, 20, has_least=True),
        BlockFormat("Q5_0", Q5_0, 32, 22, high_bits=1),
        BlockFormat("Q5_1", Q5_1, 32, 24, high_bits=1, has_least=True),
        BlockFormat("Q8_0", Q8_0, 32, 34),
        BlockFormat("Q4_K", Q4_K, 256, 144, has_least=True),
        BlockFormat("Q5_K", Q5_K, 256, 176, high_bits=1, has_least=True),
        BlockFormat("Q6_K", Q6_K, 256, 210, high_bits=2),
    )
}
