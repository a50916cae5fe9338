"""Blocks of packed weights as GGUF files have them: which formats there are, and their sizes.

A block has the weights of 32 or 256 inputs of one output: codes of 2 to 8 bits, some with their
high bits apart, and scales. A weight is `level * scale + offset`, where a code is its own level or
stands for one of 16; 32 inputs share scale and offset (16 in Q2_K, Q3_K and Q6_K).
Source: ggml's ggml-common.h and, for what bytes mean, the gguf package's quants.py.
"""

from dataclasses import dataclass

GROUP = 32
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 2, 3, 6, 7, 8, 10, 11, 12, 13, 14
IQ4_NL, IQ4_XS, MXFP4 = 20, 23, 39
# Numbers of 4 bits (E2M1), twice what they are: their scales are half as large.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks.

    Attributes:
        name, number: ggml's.
        inputs: weights of a block.
        nbytes: bytes of a block.
        high_bits: bits of a code that lie apart from its low ones.
        has_least: whether offsets are stored, too.
        levels: what the 16 codes stand for; nothing where each is its own level.
    """

    name: str
    number: int
    inputs: int
    nbytes: int
    high_bits: int = 0
    has_least: bool = False
    levels: tuple[int, ...] = ()


FORMATS = {
    made.name: made
    for made in (
        BlockFormat("Q4_0", Q4_0, 32, 18),
        BlockFormat("Q4_1", Q4_1, 32, 20, has_least=True),
        BlockFormat("Q5_0", Q5_0, 32, 22, high_bits=1),
        BlockFormat("Q5_1", Q5_1, 32, 24, high_bits=1, has_least=True),
        BlockFormat("Q8_0", Q8_0, 32, 34),
        BlockFormat("Q2_K", Q2_K, 256, 84, has_least=True),
        BlockFormat("Q3_K", Q3_K, 256, 110, high_bits=1),
        BlockFormat("Q4_K", Q4_K, 256, 144, has_least=True),
        BlockFormat("Q5_K", Q5_K, 256, 176, high_bits=1, has_least=True),
        BlockFormat("Q6_K", Q6_K, 256, 210, high_bits=2),
        BlockFormat("IQ4_NL", IQ4_NL, 32, 18, levels=UNEVEN),
        BlockFormat("IQ4_XS", IQ4_XS, 256, 136, levels=UNEVEN),
        BlockFormat("MXFP4", MXFP4, 32, 17, levels=E2M1),
    )
}
