"""Random blocks of packed weights, and what the gguf package makes of them."""

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kvlite.ops.blocks import FORMATS


def blocks(kind: str, outputs: int, inputs: int, largest: float = 0.1) -> Tensor:
    """Random blocks `(outputs, bytes of one)`, with scales of at most `largest`."""
    random, form = np.random.default_rng(0), FORMATS[kind]
    data = random.integers(0, 256, (outputs * inputs // form.inputs, form.nbytes), np.uint8)
    if kind == "MXFP4":
        data[:, 0] = random.integers(100, 127 + int(np.log2(largest)), len(data))
        return torch.from_numpy(data.reshape(outputs, -1))
    scales = random.uniform(largest / 100, largest, (len(data), 2))
    begin = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0)
    end = begin + (4 if form.has_least else 2)
    data[:, begin:end] = scales.astype(np.float16).view(np.uint8)[:, : end - begin]
    return torch.from_numpy(data.reshape(outputs, -1))


def by_gguf(kind: str, packed: Tensor) -> Tensor:
    """What the gguf package makes of blocks."""
    return torch.from_numpy(dequantize(packed.numpy(), GGMLQuantizationType[kind]))
