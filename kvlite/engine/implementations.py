"""Which implementation takes tokens through a layer: chosen here and nowhere else.

Torch's functions are the reference, on any device and for whatever a layer holds. Beside them there
is one that is fast: on CUDA Triton's kernels, on a CPU loops that numba compiles. What either has
nothing for, it leaves to torch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.engine.quantized_attention import SegmentAttention, compiled, fused, in_parts
from kvlite.model.load import LoadedModel
from kvlite.ops.device import WIDEST, has_compiled, has_triton


@dataclass(frozen=True)
class Implementation:
    """How a layer attends.

    Attributes:
        segment: to a head group with a compressed segment.
        takes_rows: whether one call takes whole rows through a layer, or several
            (`compiled_rows`, `compiled_step`).
    """

    segment: SegmentAttention
    takes_rows: bool = False


TORCH = Implementation(in_parts)
TRITON = Implementation(fused)
COMPILED = Implementation(compiled, takes_rows=True)


def implementation_for(keys: Tensor) -> Implementation:
    """The one for a layer that has such keys, `(..., dim)`."""
    if has_triton(keys.device, keys.shape[-1]):
        return TRITON
    if has_compiled(keys.device) and keys.dtype == torch.float32:
        return COMPILED
    return TORCH


def sums_in_tiles(model: LoadedModel, keys: Tensor) -> bool:
    """Whether a kernel sums up the attention that entries with such keys get, on their device or
    the planned one; products of float32 would not fit into registers."""
    kernels = model.plans_kernels if keys.is_meta else has_triton(keys.device)
    return kernels and keys.dtype != torch.float32 and keys.shape[-1] <= WIDEST


def lacking(device: torch.device) -> str:
    """The package without which a device has none but torch's; "" if it is there."""
    if device.type == "cuda":
        return "" if has_triton(device) else "triton"
    return "numba" if device.type == "cpu" and not has_compiled(device) else ""
